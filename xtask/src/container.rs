//! Programs that build images.
//! The one rule: a program counts only if it answers; a client without its daemon does not.

use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::command::{find, output, workspace};

/// What the image is called where it is built: a name that no registry is asked for.
pub(crate) const IMAGE: &str = concat!("localhost/kube-proxy-ebpf:", env!("CARGO_PKG_VERSION"));
/// How to build it, from the root of the workspace.
pub(crate) const CONTAINERFILE: &str = "deploy/Containerfile";

/// A program that builds images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Tool {
    Docker,
    Podman,
    Nerdctl,
    Buildah,
}

impl Tool {
    /// The order in which they are looked for; those that can run kind's nodes, too, come first.
    pub(crate) const ALL: [Self; 4] = [Self::Docker, Self::Podman, Self::Nerdctl, Self::Buildah];

    /// The program's name.
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
            Self::Nerdctl => "nerdctl",
            Self::Buildah => "buildah",
        }
    }

    /// Whether kind can make nodes with it.
    pub(crate) fn runs_kind(self) -> bool {
        self != Self::Buildah
    }

    /// The first that is there and works.
    pub(crate) fn find() -> Result<Self> {
        let mut reasons = Vec::new();
        for tool in Self::ALL {
            match tool.check() {
                Ok(()) => return Ok(tool),
                Err(reason) => reasons.push(reason),
            }
        }
        bail!("{}", reasons.join("; "))
    }

    /// Why it cannot be used.
    fn check(self) -> Result<(), String> {
        let program = self.program();
        let path = find(program).ok_or_else(|| format!("{program} is not installed"))?;
        let answer =
            Command::new(path).arg("info").output().map_err(|error| format!("{program}: {error}"))?;
        if answer.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&answer.stderr);
        Err(format!("{program}: {}", stderr.trim().lines().last().unwrap_or("`info` failed")))
    }

    /// The command line that builds the image, to be run in the root of the workspace.
    pub(crate) fn build(self, revision: &str) -> Vec<String> {
        let version = concat!("VERSION=", env!("CARGO_PKG_VERSION"));
        let revision = format!("REVISION={revision}");
        [self.program(), "build", "--file", CONTAINERFILE, "--tag", IMAGE]
            .into_iter()
            .chain(["--build-arg", version, "--build-arg", &revision, "."])
            .map(ToOwned::to_owned)
            .collect()
    }
}

/// The commit that is built, marked if the files are not all as it has them.
pub(crate) fn revision() -> Result<String> {
    let git = |arguments: &[&str]| output(Command::new("git").args(arguments).current_dir(workspace()));
    let commit = git(&["rev-parse", "HEAD"]).context("this is no git repository")?;
    let changed = !git(&["status", "--porcelain"])?.is_empty();
    Ok(if changed { format!("{commit}-dirty") } else { commit })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(path: &str) -> String {
        fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// The instructions of the Containerfile, continued lines joined.
    fn instructions() -> Vec<String> {
        let text = read(CONTAINERFILE).replace("\\\n", " ");
        text.lines().filter(|it| !it.is_empty() && !it.starts_with('#')).map(ToOwned::to_owned).collect()
    }

    #[test]
    fn the_image_is_built_by_the_compiler_that_the_workspace_names() {
        let manifest = read("Cargo.toml");
        let version = manifest
            .lines()
            .find_map(|it| it.strip_prefix("rust-version = \""))
            .map(|it| it.trim_end_matches('"'));
        let from =
            format!("FROM docker.io/library/rust:{}-bookworm AS build", version.expect("a rust-version"));
        assert_eq!(instructions()[0], from);
    }

    #[test]
    fn the_image_is_labelled_as_the_workspace_is_licensed_and_found() {
        let (manifest, image) = (read("Cargo.toml"), instructions().join("\n"));
        for (key, label) in [("license", "licenses"), ("repository", "source")] {
            let value =
                manifest.lines().find_map(|it| it.strip_prefix(&format!("{key} = "))).expect("a value");
            assert!(image.contains(&format!("org.opencontainers.image.{label}={value}")), "{label}");
        }
        let version = concat!("ARG VERSION=", env!("CARGO_PKG_VERSION"));
        assert!(instructions().iter().any(|it| it == version), "{version} is not the default");
    }

    #[test]
    fn every_file_of_the_image_is_in_the_context() {
        let ignored = read(".containerignore");
        // Docker reads the one, podman and buildah read either.
        assert_eq!(ignored, read(".dockerignore"));
        let ignored: Vec<_> = ignored.lines().filter(|it| !it.starts_with('#')).collect();
        let manifest = read("Cargo.toml");
        let rooms =
            manifest.split("members = [").nth(1).and_then(|it| it.split(']').next()).expect("members");
        for room in rooms.split('"').skip(1).step_by(2).chain(["LICENSE", "Cargo.lock", ".cargo"]) {
            let top = room.split('/').next().unwrap_or_default();
            assert!(!ignored.contains(&top), "{top} is left out");
        }
    }

    #[test]
    fn every_tool_builds_the_same() {
        for tool in Tool::ALL {
            let line = tool.build("abc").join(" ");
            let rest = line.strip_prefix(tool.program()).expect("the program comes first");
            assert_eq!(
                rest,
                " build --file deploy/Containerfile --tag localhost/kube-proxy-ebpf:0.1.0 \
                 --build-arg VERSION=0.1.0 --build-arg REVISION=abc ."
            );
        }
    }
}
