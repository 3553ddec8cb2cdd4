//! `cargo xtask dist`: the release, in target/dist.
//! Invariant: what was made and what was not is listed at the end, with the reason.

use std::{
    collections::BTreeMap,
    env, fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use build_tools::{
    build,
    command::{cargo, run, status, workspace},
    container::{self, ContainerTool},
    files_below,
};
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};
use tar::{Builder, Header};

use crate::{provenance::provenance, sbom::bill_of_materials};

/// The files beside the binary in the archive: every file that one of them links to is among them.
const FILES: [&str; 14] = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "deploy",
    "docs",
    "proto/examples/go",
    "proto/examples/lines.rs",
    "proto/examples/print.rs",
    "proto/examples/python",
    "tests/BEHAVIOUR.md",
    "tests/KERNELS.md",
    "tests/scenarios/README.md",
];

/// The name of an artifact, or the reason why it was not made.
type Made = Result<String, String>;

/// Builds the archive, the bill of materials, the descriptors of the contract, the provenance and their checksums, and the image, if this machine can.
pub(crate) fn dist(tool: Option<ContainerTool>, no_image: bool) -> Result<()> {
    let name = format!("kube-proxy-ebpf-{}-{}-linux", env!("CARGO_PKG_VERSION"), env::consts::ARCH);
    let folder = workspace().join("target/dist");
    // Without files of an earlier version.
    fs::remove_dir_all(&folder).or_else(ignore_missing).context("cannot remove an earlier release")?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let binary = build::build(true)?;
    let mut entries = files()?;
    entries.push(("kube-proxy-ebpf".to_owned(), binary));
    let archive = archive(&name, entries)?;
    let bill = serde_json::to_vec_pretty(&bill_of_materials()?)?;
    let descriptors = format!("kube-proxy-ebpf-{}-descriptors.binpb", env!("CARGO_PKG_VERSION"));
    let artifacts = [
        (format!("{name}.tar.gz"), archive),
        (format!("{name}.cdx.json"), bill),
        (descriptors, crate::contract::descriptors()?),
    ];
    let checksums =
        artifacts.iter().map(|(name, bytes)| (name.clone(), hex(&Sha256::digest(bytes)))).collect();
    let provenance = serde_json::to_vec_pretty(&provenance(&checksums)?)?;
    // In the format of sha256sum(1), for `sha256sum --check`.
    let lines = checksums.iter().map(|(name, checksum)| format!("{checksum}  {name}\n")).collect::<String>();
    let others =
        [(format!("{name}.intoto.json"), provenance), (format!("{name}.sha256"), lines.into_bytes())];
    for (name, bytes) in artifacts.into_iter().chain(others) {
        let path = folder.join(name);
        fs::write(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
        status("Made", &format!("{} ({} bytes)", path.display(), bytes.len()));
    }
    let image = if no_image { Err("--no-image was given".to_owned()) } else { image(tool)? };

    report("the image", image);
    Ok(())
}

fn report(artifact: &str, made: Made) {
    match made {
        Ok(name) => status("Made", &format!("{artifact}: {name}")),
        Err(reason) => status("Skipped", &format!("{artifact}: {reason}")),
    }
}

/// Every file beside the binary, by its name in the archive.
fn files() -> Result<Vec<(String, PathBuf)>> {
    let paths =
        FILES.map(|it| files_below(&workspace().join(it))).into_iter().collect::<Result<Vec<_>, _>>()?;
    let name = |it: &Path| Some(it.strip_prefix(workspace()).ok()?.to_str()?.to_owned());
    Ok(paths.into_iter().flatten().filter_map(|it| Some((name(&it)?, it))).collect())
}

/// A compressed archive that depends only on names and contents: not on times, owners or the order of a folder.
fn archive(top: &str, mut entries: Vec<(String, PathBuf)>) -> Result<Vec<u8>> {
    entries.sort();
    let mut tar = Builder::new(GzBuilder::new().mtime(0).write(Vec::new(), Compression::best()));
    for (name, path) in entries {
        let contents = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut header = Header::new_ustar();
        header.set_size(contents.len() as u64);
        header.set_mode(if name == "kube-proxy-ebpf" { 0o755 } else { 0o644 });
        header.set_mtime(0);
        tar.append_data(&mut header, format!("{top}/{name}"), &*contents)?;
    }
    Ok(tar.into_inner()?.finish()?)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|it| format!("{it:02x}")).collect()
}

/// Builds the release in two folders whose names differ in length, and compares the files.
pub(crate) fn check_reproducible() -> Result<()> {
    let parent = workspace().join("target/reproducible");
    let mut built = Vec::new();
    for folder in ["one", "the-other"].map(|it| parent.join(it)) {
        fs::remove_dir_all(&folder).or_else(ignore_missing).context("cannot remove an earlier build")?;
        let mut copy = Command::new("git");
        copy.args(["checkout-index", "--all", &format!("--prefix={}/", folder.display())]);
        run(copy.current_dir(workspace()))?;
        let mut build = cargo();
        build.args(["run", "--package", "xtask", "--", "dist", "--no-image"]);
        run(build.current_dir(&folder).env_remove("CARGO_TARGET_DIR"))?;
        let files = files_below(&folder.join("target/dist"))?;
        let read = |it: PathBuf| {
            let bytes = fs::read(&it).with_context(|| format!("cannot read {}", it.display()))?;
            Ok((it.strip_prefix(&folder)?.to_owned(), hex(&Sha256::digest(&bytes))))
        };
        built.push(files.into_iter().map(read).collect::<Result<BTreeMap<_, _>>>()?);
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

fn ignore_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Builds the image. That no tool works is a reason to skip it unless a tool was requested; a failed build is an error.
fn image(tool: Option<ContainerTool>) -> Result<Made> {
    let tool = match tool.map_or_else(ContainerTool::find, Ok) {
        Ok(tool) => tool,
        Err(reason) => return Ok(Err(format!("no container tool works on this machine: {reason:#}"))),
    };
    let words = tool.build(&container::revision());
    status("Building", &format!("the image, with {}", tool.program()));
    run(Command::new(&words[0]).args(&words[1..]).current_dir(workspace()))?;
    Ok(Ok(format!("{} (in the store of {})", container::IMAGE, tool.program())))
}

#[cfg(test)]
mod tests {
    use std::{fs::FileTimes, path::Component, time::SystemTime};

    use super::*;

    fn names_modes_and_times(archive: &[u8]) -> Vec<(String, u32, u64)> {
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(archive));
        let entries = tar.entries().expect("an archive").map(|it| it.expect("an entry"));
        let read = |it: tar::Entry<'_, _>| {
            let name = it.path().expect("a name").display().to_string();
            (name, it.header().mode().expect("a mode"), it.header().mtime().expect("a time"))
        };
        entries.map(read).collect()
    }

    #[test]
    fn equal_files_make_equal_archives() {
        let mut entries = files().expect("files");
        entries.retain(|(name, _)| name.starts_with("deploy/"));
        let copy = env::temp_dir().join(format!("kube-proxy-ebpf-dist-{}", std::process::id()));
        let mut copies = Vec::new();
        for (name, path) in entries.iter().rev() {
            let to = copy.join(name);
            fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
            fs::copy(path, &to).expect("a copy");
            let long_ago = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
            fs::File::options().append(true).open(&to).and_then(|it| it.set_times(long_ago)).expect("a time");
            copies.push((name.clone(), to));
        }
        let [one, other] = [entries, copies].map(|it| archive("top", it).expect("an archive"));
        fs::remove_dir_all(copy).expect("the copies can be removed");
        assert_eq!(hex(&Sha256::digest(&one)), hex(&Sha256::digest(&other)));
        let names = names_modes_and_times(&one);
        assert!(names.contains(&("top/deploy/base/daemonset.yaml".into(), 0o644, 0)), "{names:?}");
    }

    #[test]
    fn every_link_target_is_in_the_archive() {
        let files = files().expect("files");
        let mut count = 0;
        for (name, path) in files.iter().filter(|(name, _)| name.ends_with(".md")) {
            let text = fs::read_to_string(path).expect("a text");
            let links = text.split("](").skip(1).filter_map(|it| it.split_once(')')).map(|(it, _)| it);
            for link in links.filter(|it| !it.contains("://") && !it.starts_with('#')) {
                let to =
                    Path::new(name).parent().expect("a folder").join(link.split('#').next().expect("a path"));
                let to = to.components().fold(PathBuf::new(), |mut to, it| {
                    match it {
                        Component::ParentDir => assert!(to.pop(), "{name} links to {link}"),
                        it => to.push(it),
                    }
                    to
                });
                assert!(files.iter().any(|(it, _)| Path::new(it) == to), "{name} links to {}", to.display());
                count += 1;
            }
        }
        assert!(count > 0, "no link was found");
    }

    #[test]
    fn only_the_binary_is_executable() {
        let file = workspace().join("deploy/kustomization.yaml");
        let entries = vec![("kube-proxy-ebpf".into(), file.clone()), ("LICENSE".into(), file)];
        let names = names_modes_and_times(&archive("top", entries).expect("an archive"));
        assert_eq!(names, [("top/LICENSE".into(), 0o644, 0), ("top/kube-proxy-ebpf".into(), 0o755, 0)]);
    }
}
