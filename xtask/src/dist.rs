//! `cargo xtask dist`: what is handed to others, in target/dist.
//! The one rule: what was made and what was not is said at the end, with the reason.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};
use tar::{Builder, Header};

use crate::{
    build,
    command::{cargo, find, run, say, workspace},
    container::{self, Tool},
};

/// Beside the binary in the archive: with whatever one of them leads to.
const FILES: [&str; 8] = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "deploy",
    "proto/examples/print.rs",
    "proxy-userspace/admin/METRICS.md",
    "tests/KERNELS.md",
];

/// Builds the archive, its checksum, the bill of materials and the image, as far as this machine can.
pub(crate) fn dist(tool: Option<Tool>, no_image: bool) -> Result<()> {
    let name = format!("kube-proxy-ebpf-{}-{}-linux", env!("CARGO_PKG_VERSION"), env::consts::ARCH);
    let folder = workspace().join("target/dist");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;

    let binary = build::build(true)?;
    let mut entries = files()?;
    entries.push(("kube-proxy-ebpf".to_owned(), binary));
    let archive = archive(&name, entries)?;
    let path = folder.join(format!("{name}.tar.gz"));
    fs::write(&path, &archive).with_context(|| format!("cannot write {}", path.display()))?;
    let sum = path.with_extension("gz.sha256");
    // As sha256sum(1) writes it, and reads it with --check.
    let line = format!("{}  {name}.tar.gz\n", hex(&Sha256::digest(&archive)));
    fs::write(&sum, &line).with_context(|| format!("cannot write {}", sum.display()))?;

    let bill = bill_of_materials(&folder.join(format!("{name}.cdx.json")))?;
    let image = if no_image { Err("--no-image was given".to_owned()) } else { image(tool)? };

    say("Made", &format!("{} ({} bytes)", path.display(), archive.len()));
    say("Made", &format!("{}: {}", sum.display(), line.trim()));
    tell("the bill of materials", bill);
    tell("the image", image);
    Ok(())
}

fn tell(what: &str, made: Result<String, String>) {
    match made {
        Ok(name) => say("Made", &format!("{what}: {name}")),
        Err(reason) => say("Skipped", &format!("{what}: {reason}")),
    }
}

/// Everything beside the binary.
fn files() -> Result<Vec<(String, PathBuf)>> {
    let mut entries = Vec::new();
    for file in FILES {
        collect(&workspace().join(file), file, &mut entries)?;
    }
    Ok(entries)
}

/// Every file at or below `path`, by its name in the archive.
fn collect(path: &Path, name: &str, entries: &mut Vec<(String, PathBuf)>) -> Result<()> {
    if !path.is_dir() {
        entries.push((name.to_owned(), path.to_owned()));
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))? {
        let entry = entry?;
        collect(&entry.path(), &format!("{name}/{}", entry.file_name().to_string_lossy()), entries)?;
    }
    Ok(())
}

/// A compressed archive that depends on names and contents alone: not on times, owners, or the order of a folder.
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

/// What the binary is made of, in the form of CycloneDX; or why there is none.
fn bill_of_materials(path: &Path) -> Result<Result<String, String>> {
    if find("cargo-cyclonedx").is_none() {
        return Ok(Err("cargo-cyclonedx is not installed (`cargo install cargo-cyclonedx --locked`)".into()));
    }
    // It writes beside the manifest of each crate, under one name.
    let stem = "kube-proxy-ebpf-bill";
    run(cargo().args(["cyclonedx", "--quiet", "--format", "json", "--spec-version", "1.5"]).args([
        "--override-filename",
        stem,
        "--manifest-path",
        "proxy-userspace/Cargo.toml",
    ]))?;
    let written = format!("{stem}.json");
    let own = workspace().join("proxy-userspace").join(&written);
    fs::rename(&own, path).with_context(|| format!("cannot move {}", own.display()))?;
    let mut others = Vec::new();
    collect_named(workspace(), &written, &mut others)?;
    for other in others {
        fs::remove_file(&other).with_context(|| format!("cannot remove {}", other.display()))?;
    }
    Ok(Ok(path.display().to_string()))
}

/// Files of a name beside the manifests of the workspace.
fn collect_named(folder: &Path, name: &str, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let path = entry.path();
        let file = entry.file_name();
        if file == *name {
            found.push(path);
        } else if path.is_dir() && file != *"target" && !file.to_string_lossy().starts_with('.') {
            collect_named(&path, name, found)?;
        }
    }
    Ok(())
}

/// Builds the image; or says why not, where nobody asked for a certain tool. A build that fails is an error.
fn image(tool: Option<Tool>) -> Result<Result<String, String>> {
    let tool = match tool.map_or_else(Tool::find, Ok) {
        Ok(tool) => tool,
        Err(reason) => return Ok(Err(format!("no container tool works here: {reason:#}"))),
    };
    let words = tool.build(&container::revision().unwrap_or_else(|_| "unknown".into()));
    say("Building", &format!("the image, with {}", tool.program()));
    run(Command::new(&words[0]).args(&words[1..]).current_dir(workspace()))?;
    Ok(Ok(format!("{} (in the store of {})", container::IMAGE, tool.program())))
}

#[cfg(test)]
mod tests {
    use std::{fs::FileTimes, time::SystemTime};

    use super::*;

    fn names_and_modes(archive: &[u8]) -> Vec<(String, u32, u64)> {
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(archive));
        let entries = tar.entries().expect("an archive").map(|it| it.expect("an entry"));
        let facts = |it: tar::Entry<'_, _>| {
            let name = it.path().expect("a name").display().to_string();
            (name, it.header().mode().expect("a mode"), it.header().mtime().expect("a time"))
        };
        entries.map(facts).collect()
    }

    #[test]
    fn equal_files_make_equal_archives() {
        let folder = ::tests::deploy::folder();
        let mut entries = Vec::new();
        collect(&folder, "deploy", &mut entries).expect("a folder");
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
        let (one, other) =
            (archive("top", entries).expect("an archive"), archive("top", copies).expect("an archive"));
        fs::remove_dir_all(copy).expect("it is ours");
        assert_eq!(hex(&Sha256::digest(&one)), hex(&Sha256::digest(&other)));
        let names = names_and_modes(&one);
        assert!(names.contains(&("top/deploy/base/daemonset.yaml".into(), 0o644, 0)), "{names:?}");
    }

    #[test]
    fn no_link_leads_out_of_the_archive() {
        let files = files().expect("files");
        let mut count = 0;
        for (name, path) in files.iter().filter(|(name, _)| name.ends_with(".md")) {
            let text = fs::read_to_string(path).expect("a text");
            let links = text.split("](").skip(1).filter_map(|it| it.split_once(')')).map(|(it, _)| it);
            for link in links.filter(|it| !it.contains("://") && !it.starts_with('#')) {
                let to = Path::new(name).parent().expect("a folder").join(link);
                assert!(files.iter().any(|(it, _)| Path::new(it) == to), "{name} leads to {}", to.display());
                count += 1;
            }
        }
        assert!(count > 0, "no link was found");
    }

    #[test]
    fn only_the_binary_can_be_run() {
        let file = ::tests::deploy::folder().join("kustomization.yaml");
        let entries = vec![("kube-proxy-ebpf".into(), file.clone()), ("LICENSE".into(), file)];
        let names = names_and_modes(&archive("top", entries).expect("an archive"));
        assert_eq!(names, [("top/LICENSE".into(), 0o644, 0), ("top/kube-proxy-ebpf".into(), 0o755, 0)]);
    }
}
