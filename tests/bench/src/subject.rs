//! What can be measured.

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};

use crate::{
    apply, backends, balance, brain, connect, eject, figures::Figures, file, fleet, kube, nft, outside,
    proxies, scale,
};

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Subject {
    /// From a received state until every program uses it; a start; and the memory for both (as root)
    Apply,
    /// The backends on the contract that this machine can run: time and CPU of a change, start, memory (as root)
    Backends(backends::BackendsArguments),
    /// Time of connections to two fast endpoints and a slow one, at random and by least connections; the share of a new
    /// endpoint (as root)
    Balance,
    /// CPU and memory of the brain, from cluster states to node states
    Brain,
    /// A connect through a Service's address compared with one to an endpoint, and run times of the programs (as root)
    Connect,
    /// A node with 30 of 100 endpoints dies under 2,000 connects per second, with passive health and without (as root)
    Eject,
    /// A folder of many manifests, and one large file: time to read, CPU at rest and of a change, memory (as root)
    File,
    /// A brain that 5,000 nodes follow: time until all have a change, CPU, memory and bytes, also of its restart
    Fleet(fleet::FleetArguments),
    /// Memory and CPU of `run` with an API server, at 10,000 Services and 500 changes per second (as root)
    Kube,
    /// The nftables path: loads, changes and restarts at 100 to 30,000 Services (as root)
    Nft,
    /// Packets from outside that are forwarded whole, beside the nftables path: CPU of a packet, connections, the program, rows (as
    /// root)
    Outside,
    /// This proxy beside kube-proxy and KPNG, if their binaries are given: time and CPU of a change, start, memory, connects, at
    /// 100 to 50,000 Services (as root)
    Proxies(proxies::ProxiesArguments),
    /// A change while 50 pods per second are replaced, in clusters of up to a million endpoints: time until a connect sees it, CPU
    /// and memory (as root)
    Scale(scale::ScaleArguments),
}

/// The name of a subject alone.
#[derive(Parser)]
struct Named {
    #[command(subcommand)]
    subject: Subject,
}

/// The names of all subjects.
pub(crate) fn names() -> Vec<String> {
    Named::command().get_subcommands().map(|it| it.get_name().to_owned()).collect()
}

impl Subject {
    /// A subject with its defaults.
    pub(crate) fn named(name: &str) -> Result<Self> {
        Ok(Named::try_parse_from(["bench", name])?.subject)
    }

    /// Its figures.
    pub(crate) fn measure(self) -> Result<Figures> {
        match self {
            Self::Apply => apply::bench(),
            Self::Backends(it) => backends::bench(&it),
            Self::Balance => balance::bench(),
            Self::Brain => brain::bench(),
            Self::Connect => connect::bench(),
            Self::Eject => eject::bench(),
            Self::File => file::bench(),
            Self::Fleet(it) => fleet::bench(it),
            Self::Kube => kube::bench(),
            Self::Nft => nft::bench(),
            Self::Outside => outside::bench(),
            Self::Proxies(it) => proxies::bench(&it),
            Self::Scale(it) => scale::bench(&it),
        }
    }
}
