//! The manifests in `deploy/`, as far as tests depend on them.
//!
//! They are read from the files themselves, so that tests use what a cluster applies.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::thread::CapabilitySet;
use serde_json::Value;

use crate::skip::skip;

/// The name of the image in the manifests, before a kustomization adds a registry.
pub const IMAGE: &str = "kube-proxy-ebpf";

/// The capabilities that the DaemonSet gives its container.
pub fn capabilities() -> Result<CapabilitySet> {
    let file = folder().join("base/daemonset.yaml");
    let documents =
        documents(&fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?)?;
    let daemon_set = documents.first().context("the base has a DaemonSet")?;
    let container = &daemon_set["spec"]["template"]["spec"]["containers"][0];
    capabilities_of(container)
}

/// The capabilities that a container adds; fails if one is unknown.
pub fn capabilities_of(container: &Value) -> Result<CapabilitySet> {
    let added = container["securityContext"]["capabilities"]["add"].as_array();
    let names = added.into_iter().flatten().map(|it| it.as_str().unwrap_or_default());
    names
        .map(|it| CapabilitySet::from_name(it).with_context(|| format!("{it:?} is not a capability")))
        .collect()
}

/// The system calls that the shipped seccomp profile allows.
pub fn allowed_calls() -> Result<Vec<String>> {
    // In the binary, because a virtual machine that runs the tests has no sources.
    let profile: Value = serde_json::from_str(include_str!("../../deploy/seccomp/kube-proxy-ebpf.json"))?;
    let rules = profile["syscalls"].as_array().into_iter().flatten();
    let names = rules.flat_map(|it| it["names"].as_array().into_iter().flatten());
    Ok(names.filter_map(|it| it.as_str().map(ToOwned::to_owned)).collect())
}

pub fn folder() -> PathBuf {
    build_tools::command::workspace().join("deploy")
}

pub fn documents(text: &str) -> Result<Vec<Value>> {
    serde_saphyr::from_multiple(text).map_err(|error| anyhow!("not YAML: {error}"))
}

/// A program that renders kustomizations (`kubectl` or `kustomize`).
#[derive(Clone, Debug)]
pub struct Renderer(&'static [&'static str]);

impl Renderer {
    /// Finds one of a supported version; the error says what to install.
    pub fn find() -> Result<Self> {
        const KNOWN: [(&[&str], &[&str]); 2] = [
            (&["kubectl", "version", "--client"], &["kubectl", "kustomize"]),
            (&["kustomize", "version"], &["kustomize", "build"]),
        ];
        let mut found = Vec::new();
        for (version, render) in KNOWN {
            let Ok(output) = Command::new(version[0]).args(&version[1..]).output() else { continue };
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            match major(&text) {
                Some(major) if major >= 5 => return Ok(Self(render)),
                _ => found.push(version[0]),
            }
        }
        let old = if found.is_empty() { String::new() } else { format!(" ({} is older)", found.join(", ")) };
        bail!("no program renders kustomizations: install kubectl 1.27 or kustomize 5, or later{old}")
    }

    pub fn or_skip() -> Option<Self> {
        Self::find().inspect_err(|reason| skip(&reason.to_string())).ok()
    }

    /// The objects of a kustomization in a folder: relative to `deploy`, or absolute; the error is the program's.
    pub fn render(&self, folder: impl AsRef<Path>) -> Result<Vec<Value>> {
        let folder = self::folder().join(folder);
        let Self(program) = self;
        let output = Command::new(program[0]).args(&program[1..]).arg(&folder).output()?;
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            bail!("cannot render {}: {error}", folder.display());
        }
        documents(&String::from_utf8(output.stdout)?)
    }
}

/// The major version in the output of a version command: `Kustomize Version: v5.5.0`, or `v5.5.0` alone.
fn major(text: &str) -> Option<u32> {
    let version = text.split_once("Kustomize Version:").map_or(text, |(_, rest)| rest).trim();
    version.trim_start_matches('v').split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_kustomize_is_parsed_from_either_output() {
        assert_eq!(major("Client Version: v1.32.4\nKustomize Version: v5.5.0\n"), Some(5));
        assert_eq!(major("v5.7.1\n"), Some(5));
        assert_eq!(major("Client Version: version.Info{Major:\"1\", Minor:\"20\"}"), None);
    }
}
