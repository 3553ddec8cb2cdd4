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
        let host = host.to_string_lossy().trim().to_lowercase();
        node_name(&host).map_err(|error| anyhow!("the host name cannot be used: {error}; set --node-name"))
    }
}

fn node_name(text: &str) -> Result<String, String> {
    let is_allowed = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '-' || it == '.';
    if text.is_empty() || text.len() > 253 || !text.chars().all(is_allowed) {
        return Err(format!(
            "{text:?} is not a node name: use at most 253 lower-case letters, digits, dashes and dots"
        ));
    }
    Ok(text.into())
}
