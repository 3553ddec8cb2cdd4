//! A backend of the contract that programs iptables, as kube-proxy's iptables mode does.

mod iptables;
mod rules;
mod ruleset;
mod tools;
mod udp_flows;

use std::{net::IpAddr, process::ExitCode};

use clap::Parser;
use ipnet::IpNet;
use proxy_contract::backend::{self, Flags};

use crate::{iptables::Iptables, rules::Config, tools::Mode};

/// Programs iptables with the Services that a brain sends.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    flags: Flags,
    /// The variant of iptables
    #[arg(long, value_name = "MODE", default_value = "auto")]
    iptables_mode: Mode,
    /// The bit of a packet's mark that requests masquerading
    #[arg(long, value_name = "BIT", default_value_t = 14, value_parser = clap::value_parser!(u8).range(0..32))]
    iptables_masquerade_bit: u8,
    /// Masquerades all traffic to cluster IPs
    #[arg(long)]
    masquerade_all: bool,
    /// The node's addresses that have node ports, or ranges of them [default: all but loopback]
    #[arg(
        long,
        value_name = "CIDR",
        value_delimiter = ',',
        value_parser = range,
        env = "KUBE_PROXY_EBPF_NODE_ADDRESSES"
    )]
    nodeport_addresses: Vec<IpNet>,
    /// Removes everything that was written, and ends
    #[arg(long)]
    cleanup: bool,
}

fn range(text: &str) -> Result<IpNet, String> {
    let range = text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    range.map_err(|_| "it must be an address or a range, such as 192.0.2.0/24".to_owned())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let config = Config {
        masquerade_mark: 1 << arguments.iptables_masquerade_bit,
        masquerade_all: arguments.masquerade_all,
        inside: arguments.flags.cluster_cidr.clone(),
        node_port_addresses: arguments.nodeport_addresses,
        has_random_fully: true,
        has_bpf: true,
    };
    let mut iptables = Iptables::new(arguments.iptables_mode, config);
    if !arguments.cleanup {
        return backend::main(&arguments.flags, &mut iptables).await;
    }
    backend::exit_code(iptables.clean_up().await)
}
