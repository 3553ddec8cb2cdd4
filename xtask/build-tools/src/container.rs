//! Container tools that build the image.
//! Invariant: a tool counts only if it works; a client without its daemon does not.

use std::process::Command;

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::{
    command::{output, workspace},
    programs::find,
};

/// The image's name where it is built: a name that no registry is asked for.
pub const IMAGE: &str = concat!("localhost/kube-proxy-ebpf:", env!("CARGO_PKG_VERSION"));
/// The image's Containerfile, from the root of the workspace.
const CONTAINERFILE: &str = "deploy/Containerfile";

/// A container tool that builds images and runs kind's nodes, in order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ContainerTool {
    Docker,
    Podman,
    Nerdctl,
}

impl ContainerTool {
    pub fn program(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
            Self::Nerdctl => "nerdctl",
        }
    }

    /// The first tool that is installed and works; the error contains the reason for each that does not.
    pub fn find() -> Result<Self> {
        let mut reasons = Vec::new();
        for tool in Self::value_variants() {
            match tool.check() {
                Ok(()) => return Ok(*tool),
                Err(reason) => reasons.push(reason),
            }
        }
        bail!("{}", reasons.join("; "))
    }

    /// Checks that it works; the error says why not.
    fn check(self) -> Result<(), String> {
        let program = self.program();
        let path = find(program).ok_or_else(|| format!("{program} is not installed"))?;
        let info = Command::new(path).arg("info").output().map_err(|error| format!("{program}: {error}"))?;
        if info.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&info.stderr);
        Err(format!("{program}: {}", stderr.trim().lines().last().unwrap_or("`info` failed")))
    }

    /// The command line that builds the image, to be run in the root of the workspace.
    pub fn build(self, revision: &str) -> Vec<String> {
        let version = concat!("VERSION=", env!("CARGO_PKG_VERSION"));
        let revision = format!("REVISION={revision}");
        [self.program(), "build", "--file", CONTAINERFILE, "--tag", IMAGE]
            .into_iter()
            .chain(["--build-arg", version, "--build-arg", &revision, "."])
            .map(ToOwned::to_owned)
            .collect()
    }
}

/// The current commit, marked `-dirty` if files differ from it; `unknown` outside of a git repository.
pub fn revision() -> String {
    let git = |arguments: &[&str]| output(Command::new("git").args(arguments).current_dir(workspace()));
    let revision = || {
        let commit = git(&["rev-parse", "HEAD"])?;
        let is_dirty = !git(&["status", "--porcelain"])?.is_empty();
        anyhow::Ok(if is_dirty { format!("{commit}-dirty") } else { commit })
    };
    revision().unwrap_or_else(|_| "unknown".into())
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
    fn the_compiler_is_that_of_the_workspace_and_every_base_image_is_named_by_its_digest() {
        let images = instructions();
        let from = concat!("FROM docker.io/library/rust:", env!("CARGO_PKG_RUST_VERSION"), "-bookworm@");
        assert!(images[0].starts_with(from), "{from}");
        let images = images.iter().filter_map(|it| it.strip_prefix("FROM "));
        let images: Vec<_> = images.filter_map(|it| it.split(' ').next()).collect();
        let is_digest =
            |it: &str| it.len() == 64 && it.bytes().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'));
        let [compiler, base] = images[..] else { panic!("two stages: {images:?}") };
        assert!(compiler.split_once("@sha256:").is_some_and(|(_, digest)| is_digest(digest)), "{compiler}");
        assert_eq!(base, "scratch", "the image that runs has no files but its own");
    }

    #[test]
    fn every_file_of_the_image_is_in_the_context() {
        let ignored = read(".containerignore");
        // Docker reads .dockerignore; podman reads either.
        assert_eq!(ignored, read(".dockerignore"));
        let ignored: Vec<_> = ignored.lines().filter(|it| !it.starts_with('#')).collect();
        let manifest = read("Cargo.toml");
        let members =
            manifest.split("members = [").nth(1).and_then(|it| it.split(']').next()).expect("members");
        for member in members.split('"').skip(1).step_by(2).chain(["LICENSE", "Cargo.lock", ".cargo"]) {
            let top = member.split('/').next().unwrap_or_default();
            assert!(!ignored.contains(&top), "{top} is ignored");
        }
    }
}
