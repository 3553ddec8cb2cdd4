//! The command line: which cluster, and which of the tests.

use build_tools::container::ContainerTool;
use clap::{Parser, ValueEnum};
use serde::Deserialize;

/// Run Kubernetes' conformance tests in a kind cluster without kube-proxy (hours; needs docker and the Internet).
///
/// Creates a cluster of three nodes, builds the image and loads it, deploys the overlay `kind`, runs the conformance and
/// network tests, and removes the cluster. deploy/conformance/skip.yaml lists the tests that are skipped, with reasons.
/// After a failure, logs and each node's `dump` are in target/conformance.
#[derive(Clone, Debug, Parser)]
#[command(bin_name = "cargo xtask conformance", max_term_width = 100)]
pub(crate) struct Options {
    /// The cluster's address families
    #[arg(long, value_enum, default_value = "ipv4")]
    pub(crate) ip_family: IpFamily,
    /// Only print the commands
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Keep the cluster at the end
    #[arg(long)]
    pub(crate) keep: bool,
    /// Only tests whose names match this regular expression (RE2)
    #[arg(long, value_name = "REGEX", default_value = r"\[Conformance\]|\[sig-network\]")]
    pub(crate) focus: String,
    /// How many tests run at a time; serial tests run alone, at the end
    #[arg(long, value_name = "NUMBER", default_value = "8")]
    pub(crate) parallel: u16,
    /// The name of the cluster
    #[arg(long, value_name = "NAME", default_value = "kube-proxy-ebpf")]
    pub(crate) name: String,
    /// Builds the image and runs the nodes [default: the first of docker, podman and nerdctl that works]
    #[arg(long, value_enum)]
    pub(crate) container_tool: Option<ContainerTool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IpFamily {
    Ipv4,
    Ipv6,
    Dual,
}
