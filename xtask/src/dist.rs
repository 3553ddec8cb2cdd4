//! `cargo xtask dist`: the files of a release, in target/dist.
//! Invariant: the same commit and compiler give the same bytes, in any folder.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use build_tools::{
    build,
    command::{cargo, cargo_into_target, output, run, status, workspace},
    container, empty_folder, files_below,
    machine::Machine,
    read,
    target::Target,
    toolchain::Toolchain,
};
use serde_json::{Value, json};

use crate::{
    archive::{Entry, gzip, sha256, tar},
    image::{Image, image},
    sbom::bill_of_materials,
};

pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The files beside the binary in the archive: every file that one of them links to is among them.
const FILES: &str = include_str!("archive.txt");

pub(crate) struct Dist {
    pub(crate) folder: PathBuf,
    pub(crate) digest: String,
    pub(crate) binaries: BTreeMap<Machine, PathBuf>,
}

pub(crate) fn archive_name(machine: Machine) -> String {
    format!("kube-proxy-ebpf-{VERSION}-{}-linux.tar.gz", machine.name())
}

/// Builds the archives and bills of materials for these machines, the image, the manifests and the descriptors of the
/// contract, and the provenance and checksums of all.
pub(crate) fn dist(machines: &[Machine]) -> Result<Dist> {
    let folder = workspace().join("target/dist");
    // Without files of an earlier version.
    empty_folder(&folder)?;
    let name = format!("kube-proxy-ebpf-{VERSION}");
    let mut artifacts = Vec::new();
    let (mut binaries, mut contents) = (BTreeMap::new(), Vec::new());
    let shell_folder = shell_files()?;
    let shell_files = entries(&shell_folder, files_below(&shell_folder)?)?;
    for &machine in machines {
        status("Building", &format!("the binaries for {}", machine.name()));
        let binary = build::build_release(machine)?;
        if machine == Machine::own()? {
            let version = output(Command::new(&binary).arg("--version"))?;
            let commit = build::commit();
            ensure!(
                version.contains(&commit),
                "the binary says {version:?}, and not that its commit is {commit}"
            );
        }
        let bytes = read(&binary)?;
        let stem = archive_name(machine).replace(".tar.gz", "");
        let mut entries = files()?;
        entries.extend(shell_files.iter().cloned());
        entries.push(Entry::new("kube-proxy-ebpf", &*bytes).executable());
        for backend in build::build_release_backends(machine)? {
            let name = backend.file_name().and_then(|it| it.to_str()).context("a backend has a name")?;
            entries.push(Entry::read(name, &backend)?);
        }
        let bill = serde_json::to_vec_pretty(&bill_of_materials(machine)?)?;
        artifacts.push((format!("{stem}.tar.gz"), archive(&stem, entries)?));
        artifacts.push((format!("{stem}.cdx.json"), bill));
        contents.push((machine, bytes));
        binaries.insert(machine, binary);
    }
    let license = fs::read(workspace().join("LICENSE")).context("cannot read LICENSE")?;
    let Image { archive: oci, digest } = image(&contents, &license, &container::revision())?;
    artifacts.push((format!("{name}-image.oci.tar"), oci));
    let manifests = format!("{name}-manifests");
    artifacts.push((format!("{manifests}.tar.gz"), archive(&manifests, self::manifests(&digest)?)?));
    artifacts.push((format!("{name}-descriptors.binpb"), crate::contract::descriptors()?));

    let checksums = artifacts.iter().map(|(name, bytes)| (name.clone(), sha256(bytes))).collect();
    let provenance = serde_json::to_vec_pretty(&provenance(&checksums, machines)?)?;
    // In the format of sha256sum(1), for `sha256sum --check`.
    let lines = checksums.iter().map(|(name, checksum)| format!("{checksum}  {name}\n")).collect::<String>();
    artifacts.push((format!("{name}.intoto.json"), provenance));
    artifacts.push((format!("{name}.sha256"), lines.into_bytes()));
    for (name, bytes) in artifacts {
        let path = folder.join(name);
        fs::write(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
        status("Made", &format!("{} ({} bytes)", path.display(), bytes.len()));
    }
    Ok(Dist { folder, digest, binaries })
}

/// The provenance of a release: what was built, from which sources, by which compiler. An in-toto statement with SLSA's
/// predicate about artifacts, by name and SHA-256, with binaries for these machines. It is not signed: it says what the
/// builder believes, and a rebuild shows it (`dist --check-reproducible`).
fn provenance(checksums: &BTreeMap<String, String>, machines: &[Machine]) -> Result<Value> {
    let subject =
        |(name, checksum): (&String, &String)| json!({ "name": name, "digest": { "sha256": checksum } });
    let lock = fs::read(workspace().join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let repository = env!("CARGO_PKG_REPOSITORY");
    let revision = container::revision();
    let tools = Toolchain::find_or_install()?;
    let version = |command: &mut Command| output(command.current_dir(workspace()));
    let mut compilers = BTreeMap::new();
    for &machine in machines {
        let target = Target::find_or_install(machine)?;
        let compiler = json!({
            "rustc": version(Command::new(target.rustc()).arg("-vV"))?,
            "standardLibrary": target.standard_library(),
        });
        compilers.insert(machine.name(), compiler);
    }
    Ok(json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": checksums.iter().map(subject).collect::<Vec<_>>(),
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": format!("{repository}/cargo-xtask-dist/v1"),
                "externalParameters": { "source": repository, "revision": revision },
                "internalParameters": {
                    "compilers": compilers,
                    "rustcOfTheKernelObject": version(Command::new(&tools.rustc).arg("-vV"))?,
                    "bpfLinker": version(Command::new(&tools.linker).arg("--version"))?,
                },
                "resolvedDependencies": [
                    { "uri": format!("git+{repository}"), "digest": { "gitCommit": revision } },
                    { "uri": "Cargo.lock", "digest": { "sha256": sha256(&lock) } },
                ],
            },
            // The person who has run it: no service vouches for it.
            "runDetails": { "builder": { "id": format!("{repository}/local") } },
        },
    }))
}

/// Every file of the workspace beside the binary, by its name in the archive.
fn files() -> Result<Vec<Entry>> {
    let paths = FILES.lines().map(|it| files_below(&workspace().join(it)));
    entries(workspace(), paths.collect::<Result<Vec<_>, _>>()?.concat())
}

/// Files by their paths from a folder.
fn entries(folder: &Path, paths: Vec<PathBuf>) -> Result<Vec<Entry>> {
    let entry = |path: PathBuf| {
        let name = path.strip_prefix(folder)?.to_str().context("a path is not UTF-8")?.to_owned();
        Entry::read(name, &path)
    };
    paths.into_iter().map(entry).collect()
}

/// Writes completions for shells and man pages, from the flags; returns their folder.
pub(crate) fn shell_files() -> Result<PathBuf> {
    let folder = workspace().join("target/shell-files");
    empty_folder(&folder)?;
    run(cargo_into_target("test")
        .args(["--package", "kube-proxy-ebpf", "--bins"])
        .arg("every_command_and_flag_is_completed_and_has_a_man_page")
        .env("KUBE_PROXY_EBPF_SHELL_FILES", &folder))?;
    ensure!(!files_below(&folder)?.is_empty(), "no test has written files to {}", folder.display());
    Ok(folder)
}

/// The manifests, and the three folders beside them that docs/install.md describes, with the image by its digest.
fn manifests(digest: &str) -> Result<Vec<Entry>> {
    let mut entries = files()?;
    entries.retain(|it| {
        it.name.starts_with("deploy/") && it.name.ends_with(".yaml") || it.name == "deploy/base/config.conf"
    });
    for (name, resource) in [
        (
            "mine",
            "../deploy # or ../deploy/overlays/kubeadm, ../deploy/overlays/split, ../deploy/overlays/central, \
             ../deploy/overlays/kubeadm-split, ../deploy/overlays/kubeadm-central",
        ),
        ("mine-cleanup", "../deploy/cleanup"),
        ("mine-preflight", "../deploy/preflight"),
    ] {
        let text = format!(
            "# The image of release {VERSION}: name the registry to which you pushed it.\n\
             apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n  - {resource}\n\
             images:\n  - name: kube-proxy-ebpf\n    newName: registry.example.com/kube-proxy-ebpf\n    \
             digest: {digest}\n"
        );
        entries.push(Entry::new(format!("{name}/kustomization.yaml"), text));
    }
    Ok(entries)
}

/// A compressed archive, whose files are below one folder.
fn archive(top: &str, entries: Vec<Entry>) -> Result<Vec<u8>> {
    let entries = entries.into_iter().map(|it| Entry { name: format!("{top}/{}", it.name), ..it }).collect();
    gzip(&tar(entries, false)?)
}

/// Builds the release in two folders whose names differ in length, and compares the files.
pub(crate) fn check_reproducible(machines: &[Machine]) -> Result<()> {
    let parent = workspace().join("target/reproducible");
    let mut built = Vec::new();
    for folder in ["one", "the-other"].map(|it| parent.join(it)) {
        empty_folder(&folder)?;
        let mut copy = Command::new("git");
        copy.args(["checkout-index", "--all", &format!("--prefix={}/", folder.display())]);
        run(copy.current_dir(workspace()))?;
        let mut build = cargo();
        build.args(["run", "--package", "xtask", "--", "dist"]);
        build.args(machines.iter().flat_map(|it| ["--arch", it.name()]));
        run(build.current_dir(&folder).env_remove("CARGO_TARGET_DIR"))?;
        let files = files_below(&folder.join("target/dist"))?;
        let checksum = |it: PathBuf| Ok((it.strip_prefix(&folder)?.to_owned(), sha256(&read(&it)?)));
        built.push(files.into_iter().map(checksum).collect::<Result<BTreeMap<_, _>>>()?);
    }
    let [one, other] = built.try_into().map_err(|_| anyhow!("two folders were built"))?;
    for (path, checksum) in &one {
        status("Built", &format!("{checksum}  {}", path.display()));
    }
    let differ: Vec<_> =
        one.iter().filter(|(it, sum)| other.get(*it) != Some(*sum)).map(|(it, _)| it).collect();
    ensure!(
        differ.is_empty() && one.len() == other.len(),
        "not reproducible: {differ:?} in {}",
        parent.display()
    );
    status("Same", &format!("{} files from two folders have the same bytes", one.len()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Component;

    use super::*;
    use crate::archive::tests::read as read_archive;

    /// Whether a document has a heading with this anchor.
    fn has_anchor(text: &str, anchor: &str) -> bool {
        text.lines().filter_map(|it| it.strip_prefix('#')).any(|it| {
            let heading = it.trim_matches(['#', ' ']).to_lowercase().replace(' ', "-");
            heading.chars().filter(|it| it.is_alphanumeric() || "-_".contains(*it)).eq(anchor.chars())
        })
    }

    #[test]
    fn every_link_target_is_in_the_archive() {
        const REPOSITORY: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/");
        let files = files().expect("files");
        let mut count = 0;
        for Entry { name, bytes, .. } in files.iter().filter(|it| it.name.ends_with(".md")) {
            let text = std::str::from_utf8(bytes).expect("a text");
            let links = text.split("](").skip(1).filter_map(|it| it.split_once(')')).map(|(it, _)| it);
            for link in links {
                let (folder, path) = match link.strip_prefix(REPOSITORY) {
                    Some(path) => (Path::new(""), path),
                    None if link.contains("://") => continue,
                    None => (Path::new(name).parent().expect("a folder"), link),
                };
                let (path, anchor) = path.split_once('#').unwrap_or((path, ""));
                let to = if path.is_empty() { Path::new(name).to_owned() } else { folder.join(path) };
                let to = to.components().fold(PathBuf::new(), |mut to, it| {
                    match it {
                        Component::ParentDir => assert!(to.pop(), "{name} links to {link}"),
                        it => to.push(it),
                    }
                    to
                });
                // To a file, or to a folder.
                let target = files.iter().find(|it| Path::new(&it.name).starts_with(&to));
                let target = target.unwrap_or_else(|| panic!("{name} links to {}", to.display()));
                let has_anchor = || has_anchor(&String::from_utf8_lossy(&target.bytes), anchor);
                assert!(anchor.is_empty() || has_anchor(), "{name} links to {link}");
                count += 1;
            }
        }
        assert!(count > 0, "no link was found");
    }

    #[test]
    fn the_manifests_name_the_image_of_the_release_by_its_digest() {
        let digest = "sha256:0123";
        let archive = archive("top", manifests(digest).expect("manifests")).expect("an archive");
        let files: BTreeMap<_, _> =
            read_archive(flate2::read::GzDecoder::new(&*archive)).into_iter().collect();
        let mut resources = Vec::new();
        for folder in ["mine", "mine-cleanup", "mine-preflight"] {
            let (_, text) = &files[&format!("top/{folder}/kustomization.yaml")];
            let text = std::str::from_utf8(text).expect("a text");
            assert!(
                text.contains(&format!("release {VERSION}:"))
                    && text.contains(&format!("digest: {digest}\n"))
            );
            resources.extend(
                text.split("../")
                    .skip(1)
                    .map(|it| it.split([' ', ',', '\n']).next().expect("a path").to_owned()),
            );
        }
        assert_eq!(resources.len(), 8, "{resources:?}");
        for it in resources {
            assert!(files.contains_key(&format!("top/{it}/kustomization.yaml")), "{it}");
        }
    }
}
