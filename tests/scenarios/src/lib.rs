//! Scenarios: how the proxy behaves, as data. `README.md` describes the files beside it.
//!
//! Each scenario runs against the brain (`brain/tests/scenarios.rs`), the maps in memory
//! (`datapath-ebpf/src/tables/double_buffer/tests/by_scenario.rs`), a brain and its followers
//! (`grpc-server/tests/grpc/cluster_convergence.rs`), and the kernel (`tests/tests/end_to_end/scenarios.rs`).

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use brain::Options;
use model::{cluster::ClusterState, state::NodeState};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use source::file::parse;

#[derive(Debug)]
pub struct Scenario {
    /// Its name, with the name of its file: `policies/cluster-policy-uses-every-ready-endpoint`.
    pub name: String,
    pub node: String,
    /// The value of `--service-proxy-name`, if any.
    pub service_proxy_name: Option<String>,
    /// What happens: first the manifests of the scenario itself, and then every change.
    pub steps: Vec<Step>,
}

/// A change of the cluster, and what it leads to. What is absent is not checked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    pub about: String,
    /// In a file the objects that are added or replaced; here all objects of the cluster after this step.
    #[serde(default)]
    pub manifests: Vec<Value>,
    /// The objects that are removed, as `Service default/web`.
    #[serde(default)]
    pub removed: Vec<String>,
    /// The Services that the brain serves, see `README.md`.
    pub expect: Option<Value>,
    /// What `dump` prints, without the addresses of the node.
    pub dump: Option<String>,
    /// Who answers at `ADDRESS:PORT/PROTOCOL`.
    #[serde(default)]
    pub answers: BTreeMap<String, Answer>,
    #[serde(default)]
    pub log: Vec<String>,
    #[serde(default)]
    pub metrics: BTreeMap<String, f64>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(untagged)]
pub enum Answer {
    /// Nobody: `refused`, or `untranslated` if the address is not translated.
    Error(String),
    /// Each of these addresses, and no other.
    Endpoints(Vec<String>),
}

/// The files and their topics; in the binary, because a virtual machine that runs the tests has no sources.
const FILES: [(&str, &str); 9] = [
    ("changes", include_str!("../changes.yaml")),
    ("dual-stack", include_str!("../dual-stack.yaml")),
    ("frontends", include_str!("../frontends.yaml")),
    ("load-balancing", include_str!("../load-balancing.yaml")),
    ("policies", include_str!("../policies.yaml")),
    ("services", include_str!("../services.yaml")),
    ("slices", include_str!("../slices.yaml")),
    ("terminating", include_str!("../terminating.yaml")),
    ("topology", include_str!("../topology.yaml")),
];

/// Every scenario; panics if a file is not valid.
pub fn all() -> Vec<Scenario> {
    FILES.into_iter().flat_map(|(topic, text)| read(topic, text)).collect()
}

fn read(topic: &str, text: &str) -> Vec<Scenario> {
    let mut text = text.as_bytes();
    let documents = serde_saphyr::read::<_, Map<String, Value>>(&mut text);
    let scenarios = documents.map(|document| {
        let document = document.map_err(|error| error.to_string());
        document.and_then(|it| scenario(topic, it)).unwrap_or_else(|error| panic!("{topic}.yaml: {error}"))
    });
    scenarios.collect()
}

/// Reads a document: the fields of a scenario and those of its first step.
fn scenario(topic: &str, mut document: Map<String, Value>) -> Result<Scenario, String> {
    let mut text = |field| document.remove(field).map(|it| it.as_str().unwrap_or_default().to_owned());
    let name = format!("{topic}/{}", text("name").ok_or("a scenario has no name")?);
    let node = text("node").ok_or_else(|| format!("{name} has no node"))?;
    let service_proxy_name = text("serviceProxyName");
    let changes = document.remove("then").unwrap_or_else(|| json!([]));
    let first = Value::from(document);
    let mut steps = Vec::new();
    let mut objects: BTreeMap<String, Value> = BTreeMap::new();
    for step in [first].iter().chain(changes.as_array().unwrap_or(&Vec::new())) {
        let mut step = Step::deserialize(step).map_err(|error| format!("{name}: {error}"))?;
        for it in &step.removed {
            objects.remove(it).ok_or_else(|| format!("{name}: {it} does not exist"))?;
        }
        objects.extend(step.manifests.into_iter().map(|it| (identity(&it), it)));
        step.manifests = objects.values().cloned().collect();
        steps.push(step);
    }
    Ok(Scenario { name, node, service_proxy_name, steps })
}

/// The kind, namespace and name of an object.
fn identity(object: &Value) -> String {
    let field = |path| object.pointer(path).and_then(Value::as_str).unwrap_or_default();
    let namespace = field("/metadata/namespace");
    let separator = if namespace.is_empty() { "" } else { "/" };
    format!("{} {namespace}{separator}{}", field("/kind"), field("/metadata/name"))
}

impl Scenario {
    pub fn node_state(&self, step: &Step) -> NodeState {
        brain::node_state(&step.cluster(), &self.node, &self.options())
    }

    pub fn options(&self) -> Options {
        Options { service_proxy_name: self.service_proxy_name.clone(), ..Options::default() }
    }
}

impl Step {
    /// All objects of the cluster, as a list that is a manifest.
    pub fn manifest(&self) -> String {
        json!({"apiVersion": "v1", "kind": "List", "items": self.manifests}).to_string()
    }

    /// The state of the cluster; panics if a manifest cannot be parsed.
    pub fn cluster(&self) -> ClusterState {
        let parsed = parse(self.manifest().as_bytes());
        let parsed = parsed.unwrap_or_else(|error| panic!("{}: {error}", self.about));
        let mut cluster = ClusterState::default();
        parsed.objects.into_iter().for_each(|(_, it)| cluster.set(it));
        cluster
    }

    /// The lines of the expected dump, sorted.
    pub fn dump(&self) -> Option<Vec<String>> {
        Some(self.dump.as_ref()?.lines().map(ToOwned::to_owned).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::FILES;

    #[test]
    fn no_file_is_left_out() {
        let folder = std::fs::read_dir(env!("CARGO_MANIFEST_DIR")).unwrap().flatten();
        let files = folder.filter(|it| it.path().extension().is_some_and(|it| it == "yaml"));
        assert_eq!(files.count(), FILES.len());
    }
}
