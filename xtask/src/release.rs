//! `cargo xtask release`: what a release needs, checked and built.
//! Invariant: nothing leaves this machine; what a maintainer does next is printed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use build_tools::{
    SKIPPED_TESTS_FILE,
    command::{cargo_into_target, output, run, status, workspace},
    container, empty_folder, files_below,
    machine::Machine,
};

use crate::dist::{Dist, VERSION, archive_name, dist};

/// The name of the test in tests/tests/end_to_end/upgrade.rs, and of its variables.
const TEST: &str = "upgrade::sockets_are_kept_by_an_upgrade_from_the_previous_release";
const PREVIOUS: &str = "KUBE_PROXY_EBPF_PREVIOUS_RELEASE";
const THIS: &str = "KUBE_PROXY_EBPF_THIS_RELEASE";

/// Checks and builds a release. What is in the way is an error; a dry run builds nevertheless, and lists it at the end.
pub(crate) fn release(dry_run: bool, previous: Option<&Path>) -> Result<()> {
    let obstacles = obstacles()?;
    ensure!(
        dry_run || obstacles.is_empty(),
        "{VERSION} cannot be released:\n{}\n`--dry-run` builds it all the same",
        list(&obstacles)
    );
    // Before the build, which takes minutes.
    let previous = previous.map(unpack_previous).transpose()?;
    let dist = dist(&Machine::ALL)?;
    if let Some((binary, version)) = previous {
        upgrade(&binary, &version, &dist)?;
    } else {
        status("Skipped", "the upgrade from the previous release: no archive of one was given (--previous)");
    }
    let changelog = fs::read_to_string(workspace().join("CHANGELOG.md"))?;
    let notes = workspace().join("target/release-notes.md");
    fs::write(&notes, release_notes(&changelog, &dist.digest)).context("cannot write the release notes")?;
    status("Drafted", &notes.display().to_string());
    print(&dist, &obstacles)
}

/// The newest section of the changelog, whose links hold outside of the repository, and the image.
fn release_notes(changelog: &str, digest: &str) -> String {
    let section = changelog.split("\n## ").nth(1).and_then(|it| it.split_once('\n')).unwrap_or_default().1;
    let links = format!("]({}/blob/v{VERSION}/", env!("CARGO_PKG_REPOSITORY"));
    let mut section = section.trim().replace("](", &links);
    section = section.replace(&format!("{links}https:"), "](https:");
    format!("{section}\n\nImage: `{digest}`\n")
}

fn list(items: &[String]) -> String {
    items.iter().map(|it| format!("  - {it}")).collect::<Vec<_>>().join("\n")
}

/// Why this commit cannot be released, each with its remedy.
fn obstacles() -> Result<Vec<String>> {
    let mut obstacles = Vec::new();
    let changelog =
        fs::read_to_string(workspace().join("CHANGELOG.md")).context("cannot read CHANGELOG.md")?;
    let newest = newest_heading(&changelog).unwrap_or("nothing");
    if newest != VERSION {
        obstacles
            .push(format!("the newest heading of CHANGELOG.md is {newest:?}: write `## [{VERSION}] - DATE`"));
    }
    for file in
        files_below(&workspace().join("deploy"))?.iter().filter(|it| it.ends_with("kustomization.yaml"))
    {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let tags = text.lines().filter_map(|it| it.trim().strip_prefix("newTag: "));
        for tag in tags.filter(|it| *it != VERSION) {
            obstacles.push(format!("{} names the image {tag}: write `newTag: {VERSION}`", file.display()));
        }
    }
    let revision = container::revision();
    if revision.ends_with("-dirty") || revision == "unknown" {
        obstacles.push(format!("the commit is {revision}: commit everything"));
    }
    let mut tag = Command::new("git");
    tag.args(["rev-parse", "--verify", "--quiet", &format!("refs/tags/v{VERSION}^{{commit}}")]);
    if let Ok(tagged) = output(tag.current_dir(workspace()))
        && tagged != revision
    {
        obstacles.push(format!("the tag v{VERSION} is at {tagged}: raise the version in Cargo.toml"));
    }
    Ok(obstacles)
}

/// The version in the heading of the newest section, such as `## [0.1.0] - 2026-12-01`.
fn newest_heading(changelog: &str) -> Option<&str> {
    let heading = changelog.lines().find_map(|it| it.strip_prefix("## "))?;
    Some(heading.split(" - ").next()?.trim_matches(['[', ']', ' ']))
}

/// Unpacks the binary of an earlier release; returns it with its version.
fn unpack_previous(archive: &Path) -> Result<(PathBuf, String)> {
    let binary = unpack_binary(archive, &workspace().join("target/previous-release"))?;
    let version = output(Command::new(&binary).arg("--version"))
        .with_context(|| format!("{} has no binary for {}", archive.display(), std::env::consts::ARCH))?;
    Ok((binary, version))
}

/// Upgrades a node, under load, from an earlier release to this one, and back.
fn upgrade(binary: &Path, version: &str, dist: &Dist) -> Result<()> {
    status("Upgrading", &format!("a node from {version} to {VERSION}, under load"));
    let skipped = binary.with_file_name("skipped");
    let mut test = cargo_into_target("test");
    test.args(["--package", "tests", "--test", "end_to_end", "--", "--ignored", "--exact", TEST]);
    let this = &dist.binaries[&Machine::own()?];
    run(test.env(PREVIOUS, binary).env(THIS, this).env(SKIPPED_TESTS_FILE, &skipped))?;
    match fs::read_to_string(&skipped) {
        Ok(reason) => bail!("the upgrade was not tried: {}", reason.trim()),
        Err(_) => Ok(()),
    }
}

/// The binary in an archive of [`dist`], in a folder, which is emptied.
fn unpack_binary(archive: &Path, folder: &Path) -> Result<PathBuf> {
    empty_folder(folder)?;
    let file = fs::File::open(archive).with_context(|| format!("cannot open {}", archive.display()))?;
    let unreadable = || format!("{} is not an archive of a release", archive.display());
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(file));
    for entry in tar.entries().with_context(unreadable)? {
        let mut entry = entry.with_context(unreadable)?;
        let path = entry.path()?.into_owned();
        if path.components().count() == 2 && path.ends_with("kube-proxy-ebpf") {
            let binary = folder.join("kube-proxy-ebpf");
            entry.unpack(&binary).with_context(unreadable)?;
            return Ok(binary);
        }
    }
    bail!("{} contains no kube-proxy-ebpf", archive.display())
}

/// Prints what would be published, what is in the way, and what a maintainer does next.
fn print(dist: &Dist, obstacles: &[String]) -> Result<()> {
    println!("\nkube-proxy-ebpf {VERSION}, in {}:\n", dist.folder.display());
    for file in files_below(&dist.folder)? {
        let size = fs::metadata(&file)?.len();
        println!("{size:>12}  {}", file.file_name().unwrap_or_default().to_string_lossy());
    }
    println!("\nimage {}", dist.digest);
    if !obstacles.is_empty() {
        println!("\nIn the way of a release:\n{}", list(obstacles));
    }
    let files = dist.folder.display();
    println!(
        "\nNothing was published. Next:\n\n  \
         git tag --sign v{VERSION} && git push origin v{VERSION}\n  \
         skopeo copy --all oci-archive:{files}/kube-proxy-ebpf-{VERSION}-image.oci.tar docker://REGISTRY/kube-proxy-ebpf:{VERSION}\n  \
         upload the files with target/release-notes.md; {} is what the next release is tested against (--previous)\n  \
         cp {files}/kube-proxy-ebpf-{VERSION}-descriptors.binpb proto/tests/released.binpb, and commit it",
        archive_name(Machine::own()?)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::{Entry, gzip, tar};

    #[test]
    fn the_newest_heading_is_a_version() {
        for (text, version) in [
            ("# Changelog\n\n## [0.2.0] - 2026-12-01\n\n## [0.1.0] - 2026-11-01\n", "0.2.0"),
            ("# Changelog\n\n## 0.1.0\n", "0.1.0"),
            ("## Unreleased\n\n## 0.1.0\n", "Unreleased"),
        ] {
            assert_eq!(newest_heading(text), Some(version), "{text}");
        }
        assert_eq!(newest_heading("# Changelog\n"), None);
    }

    #[test]
    fn release_notes_are_the_newest_section_with_absolute_links() {
        let text = "# Changelog\n\n## 0.2.0\n\n- A flag ([flags](docs/flags.md), [KEP](https://kep.dev)).\n\n## 0.1.0\n\n- Old.\n";
        let docs = format!("{}/blob/v{VERSION}/docs/flags.md", env!("CARGO_PKG_REPOSITORY"));
        let expected = format!("- A flag ([flags]({docs}), [KEP](https://kep.dev)).\n\nImage: `sha256:1`\n");
        assert_eq!(release_notes(text, "sha256:1"), expected);
    }

    #[test]
    fn the_manifests_name_the_version_of_the_workspace() {
        let obstacles = obstacles().expect("the files can be read");
        assert!(!obstacles.iter().any(|it| it.contains("newTag")), "{obstacles:?}");
    }

    #[test]
    fn the_binary_of_an_archive_is_found_or_missed() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, unpacked) = (folder.path().join("archive.tar.gz"), folder.path().join("unpacked"));
        let write = |entries| {
            let bytes = gzip(&tar(entries, false).expect("an archive")).expect("gzip");
            fs::write(&file, bytes).expect("a file");
        };
        write(vec![
            Entry::new("top/docs/kube-proxy-ebpf", "a text"),
            Entry::new("top/kube-proxy-ebpf", "the binary").executable(),
        ]);
        let binary = unpack_binary(&file, &unpacked).expect("a binary");
        assert_eq!(fs::read_to_string(binary).expect("a file"), "the binary");
        write(vec![Entry::new("top/README.md", "a text")]);
        let error = unpack_binary(&file, &unpacked).expect_err("no binary");
        assert!(error.to_string().contains("contains no kube-proxy-ebpf"), "{error}");
        fs::write(&file, "no archive").expect("a file");
        let error = unpack_binary(&file, &unpacked).expect_err("no archive");
        assert!(error.to_string().contains("is not an archive of a release"), "{error}");
    }
}
