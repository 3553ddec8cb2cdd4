//! The bill of materials: every crate in the binary and in its kernel object, in the format of CycloneDX.
//! Invariant: it depends only on the manifests and Cargo.lock; there is no time and no random number in it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context as _, Result};
use build_tools::{
    command::{cargo, output, workspace},
    machine::Machine,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// The crates that are shipped: the binary, and the kernel object that it embeds.
const SHIPPED: [&str; 2] = ["kube-proxy-ebpf", "proxy-ebpf"];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// `None` for what is linked; `build` and `dev` are not in the binary.
    kind: Option<String>,
}

pub(crate) fn bill_of_materials(machine: Machine) -> Result<Value> {
    let platform = machine.target();
    let arguments = ["metadata", "--format-version", "1", "--locked", "--filter-platform", platform];
    let metadata: Metadata =
        serde_json::from_str(&output(cargo().args(arguments).current_dir(workspace()))?)?;
    let lock = fs::read_to_string(workspace().join("Cargo.lock")).context("cannot read Cargo.lock")?;
    Ok(render(&metadata, &checksums(&lock)))
}

fn render(metadata: &Metadata, checksums: &BTreeMap<(String, String), String>) -> Value {
    let packages: BTreeMap<&str, &Package> = metadata.packages.iter().map(|it| (&*it.id, it)).collect();
    let linked: BTreeMap<&str, Vec<&str>> = metadata.resolve.nodes.iter().map(linked).collect();
    let roots = metadata.packages.iter().filter(|it| SHIPPED.contains(&&*it.name));
    let mut queue: Vec<_> = roots.map(|it| &*it.id).collect();
    let mut found = BTreeSet::new();
    while let Some(id) = queue.pop() {
        if found.insert(id) {
            queue.extend(linked.get(id).into_iter().flatten());
        }
    }
    let purl = |id: &str| packages.get(id).map(|it| format!("pkg:cargo/{}@{}", it.name, it.version));
    let (mut components, mut dependencies) = (BTreeMap::new(), BTreeMap::new());
    for (id, package) in found.iter().filter_map(|id| Some((*id, *packages.get(id)?))) {
        let Package { name, version, license, .. } = package;
        let purl_of_this = purl(id);
        let mut component = json!({
            "type": if name == SHIPPED[0] { "application" } else { "library" },
            "bom-ref": purl_of_this, "name": name, "version": version, "purl": purl_of_this,
        });
        if let Some(license) = license {
            // Some crates still write `/` for OR.
            component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
        }
        if let Some(checksum) = checksums.get(&(name.clone(), version.clone())) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        let uses: BTreeSet<_> = linked.get(id).into_iter().flatten().filter_map(|it| purl(it)).collect();
        dependencies.insert(purl_of_this.clone(), json!({ "ref": purl_of_this, "dependsOn": uses }));
        components.insert(purl_of_this, component);
    }
    let product = packages.values().find(|it| it.name == SHIPPED[0]).and_then(|it| purl(&it.id));
    let product = components.remove(&product);
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": product },
        "components": components.into_values().collect::<Vec<_>>(),
        "dependencies": dependencies.into_values().collect::<Vec<_>>(),
    })
}

/// A package, and what is linked into it.
fn linked(node: &Node) -> (&str, Vec<&str>) {
    let is_linked = |it: &&Dependency| it.dep_kinds.iter().any(|it| it.kind.is_none());
    (&node.id, node.deps.iter().filter(is_linked).map(|it| &*it.pkg).collect())
}

/// The checksums in Cargo.lock, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let packages = lock.split("[[package]]").skip(1).filter_map(|package| {
        let field = |name| package.lines().find_map(|it| it.strip_prefix(name)?.strip_suffix('"'));
        let name = (field("name = \"")?.to_owned(), field("version = \"")?.to_owned());
        Some((name, field("checksum = \"")?.to_owned()))
    });
    packages.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bill_lists_what_is_linked_and_nothing_else() {
        let bill = bill_of_materials(Machine::Aarch64).expect("a bill");
        let names: Vec<_> = bill["components"].as_array().expect("components").iter().collect();
        let find = |name: &str| names.iter().find(|it| it["name"] == name);
        assert_eq!(bill["metadata"]["component"]["name"], "kube-proxy-ebpf");
        let tokio = find("tokio").expect("the binary uses tokio");
        assert_eq!(tokio["hashes"][0]["content"].as_str().map(str::len), Some(64), "{tokio}");
        assert_eq!(tokio["licenses"][0]["expression"], "MIT");
        // Of the kernel object.
        assert!(find("aya-ebpf").is_some());
        for only_for_tests in ["proptest", "clap_derive_tests", "libfuzzer-sys", "xtask"] {
            assert!(find(only_for_tests).is_none(), "{only_for_tests}");
        }
        let refs: BTreeSet<_> = names.iter().map(|it| it["bom-ref"].to_string()).collect();
        assert_eq!(refs.len(), names.len(), "every component has a name of its own");
        for it in bill["dependencies"].as_array().expect("dependencies") {
            let uses = it["dependsOn"].as_array().expect("a list");
            assert!(uses.iter().all(|it| refs.contains(&it.to_string())), "{it}");
        }
    }
}
