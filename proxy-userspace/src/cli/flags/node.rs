//! The node that is served.

use anyhow::{Context as _, Result, anyhow};
use clap::Args;

/// The node that is served.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct NodeFlags {
    /// Name of the Node object of this node [default: the host name, in lower case]
    #[arg(
        long,
        value_name = "NAME",
        env = "NODE_NAME",
        value_parser = node_name,
        visible_alias = "hostname-override"
    )]
    node_name: Option<String>,
}

impl NodeFlags {
    /// The name, by default that of the host.
    pub(in crate::cli) fn name(&self) -> Result<String> {
        if let Some(name) = &self.node_name {
            return Ok(name.clone());
        }
        let host = nix::unistd::gethostname().context("the host has no name; set --node-name")?;
        node_name(&host.to_string_lossy())
            .map_err(|error| anyhow!("the host name cannot be used: {error}; set --node-name"))
    }
}

/// A node name, trimmed and in lower case, as kube-proxy and the kubelet have it.
fn node_name(text: &str) -> Result<String, String> {
    let text = text.trim().to_lowercase();
    let is_allowed = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '-' || it == '.';
    if text.is_empty() || text.len() > 253 || !text.chars().all(is_allowed) {
        return Err(format!(
            "{text:?} is not a node name: use at most 253 lower-case letters, digits, dashes and dots"
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_name_is_trimmed_and_in_lower_case() {
        assert_eq!(node_name(" Worker-1.Example.ORG\n").unwrap(), "worker-1.example.org");
        for it in ["", "  ", "a b", "a/b", "ä", &"a".repeat(254)] {
            assert!(node_name(it).unwrap_err().contains("lower-case letters"), "{it:?}");
        }
    }
}
