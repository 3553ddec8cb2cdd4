//! The state of the kernel and of the running process.

use std::{io, mem, ops::Range, path::Path};

use anyhow::Result;
use datapath::{ActiveFrontend, AttachStatus, FrontendAddress};
use datapath_ebpf::{self as ebpf, ActiveFrontends, Counts, ForwardSummary, Options};
use datapath_nft as nft;

use super::{
    names::{Names, PortName},
    process::Process,
};
use crate::cli::flags::ReportFlags;

/// The state at one time. What cannot be read is an error text.
pub(in crate::cli) struct Seen {
    pub(super) rows: Rows,
    /// The generation of the eBPF maps; `None` without eBPF maps.
    pub(super) generation: Result<Option<u32>, String>,
    pub(super) counts: Result<Counts, String>,
    pub(super) hooks: Result<AttachStatus, String>,
    pub(super) packets: Result<String, String>,
    /// What is forwarded of packets from outside; `None` if nothing is.
    pub(super) forwarding: Result<Option<ForwardSummary>, String>,
    pub(in crate::cli) process: Process,
}

/// The frontends, read one by one.
pub(super) struct Rows {
    /// Those that the process names, sorted by name, after those that are in the kernel and have no name.
    frontends: Vec<(PortName, FrontendAddress)>,
    kernel: Frontends,
    /// Why one could not be read.
    pub(super) error: Option<String>,
}

impl Rows {
    /// The addresses are those in the kernel that have no name.
    fn new(kernel: Frontends, unnamed: Result<Vec<FrontendAddress>, String>, names: Names) -> Self {
        let error = unnamed.as_ref().err().cloned();
        let mut unnamed = unnamed.unwrap_or_default();
        unnamed.sort_by_cached_key(ToString::to_string);
        let mut named: Vec<_> = names.0.into_iter().map(|(address, it)| (it.port, address)).collect();
        named.sort_by(|(a, at), (b, other)| a.cmp(b).then_with(|| at.to_string().cmp(&other.to_string())));
        let unnamed = unnamed.into_iter().map(|address| (PortName::default(), address));
        Self { frontends: unnamed.chain(named).collect(), kernel, error }
    }

    /// All that the kernel has, each with its number and its name.
    pub(super) fn each(
        &mut self,
        mut each: impl FnMut(usize, &PortName, ActiveFrontend) -> io::Result<()>,
    ) -> io::Result<()> {
        for number in 0..self.frontends.len() {
            if let Some((name, frontend)) = self.get(number) {
                each(number, name, frontend)?;
            }
        }
        Ok(())
    }

    pub(super) fn get(&mut self, number: usize) -> Option<(&PortName, ActiveFrontend)> {
        let (name, address) = self.frontends.get(number)?;
        let found = match &mut self.kernel {
            Frontends::Sockets(it) => it.get(address).map_err(message),
            Frontends::Packets(it) => it.get(&self.frontends, number),
        };
        let found = found.unwrap_or_else(|error| {
            self.error = Some(error);
            None
        });
        Some((name, found?))
    }
}

enum Frontends {
    /// Those of eBPF are looked up one by one.
    Sockets(Box<ActiveFrontends>),
    /// Those of nftables are listed, many at a time.
    Packets(Batch),
}

/// How many frontends of nftables are read at a time: each reading lists all elements.
const BATCH: usize = 1000;

/// The frontends of nftables that were read last.
#[derive(Default)]
struct Batch {
    /// Their numbers.
    range: Range<usize>,
    /// Those that exist, sorted.
    frontends: Vec<ActiveFrontend>,
}

impl Batch {
    /// The frontend with this number among all.
    fn get(
        &mut self,
        all: &[(PortName, FrontendAddress)],
        number: usize,
    ) -> Result<Option<ActiveFrontend>, String> {
        if !self.range.contains(&number) {
            self.range = number..all.len().min(number + BATCH);
            self.frontends.clear();
            let addresses = all[self.range.clone()].iter().map(|(_, address)| *address).collect();
            self.frontends = nft::frontends_at(&addresses).map_err(message)?;
        }
        let address = all[number].1.to_string();
        let found = self.frontends.binary_search_by(|it| it.frontend.cmp(&address));
        Ok(found.ok().map(|it| self.frontends[it].clone()))
    }
}

impl Seen {
    /// Reads the process, the eBPF datapath, and nftables; fails if neither datapath has been programmed. The frontends are those
    /// of nftables if there are no eBPF maps; they are read when they are written.
    pub(in crate::cli) fn read(options: &Options, reports: &ReportFlags) -> Result<Self> {
        // The process is queried first: the kernel's state is then at least as new.
        let mut process = Process::query(reports);
        let pins = &options.pin_dir;
        let names = mem::take(&mut process.names);
        let is_unnamed = |it: &FrontendAddress| !names.0.contains_key(it);
        let sockets = ActiveFrontends::open(pins).and_then(|it| Ok((it, ebpf::generation(pins)?)));
        let (kernel, unnamed, generation) = match sockets {
            Ok((mut frontends, generation)) => {
                let unnamed = frontends.filter_map(|it| Some(it.address).filter(is_unnamed)).map_err(message);
                (Frontends::Sockets(Box::new(frontends)), unnamed, Ok(Some(generation)))
            }
            Err(error) => {
                // An error of nftables is reported by `packets` below.
                let packets = nft::frontend_addresses();
                let generation = match error {
                    ebpf::Error::NotInitialized(_) if packets.as_ref().is_ok_and(Vec::is_empty) => {
                        return Err(error.into());
                    }
                    ebpf::Error::NotInitialized(_) => Ok(None),
                    error => Err(message(error)),
                };
                let mut unnamed = packets.unwrap_or_default();
                unnamed.retain(is_unnamed);
                (Frontends::Packets(Batch::default()), Ok(unnamed), generation)
            }
        };
        let packets = match nft::check::tables(matches!(generation, Ok(Some(_)))) {
            Ok(finding) => Ok(finding.says),
            // A kernel without nftables is a result, not a failure to read.
            Err(error) if error.is_nftables_missing() => Ok(message(error)),
            Err(error) => Err(message(error)),
        };
        Ok(Self {
            rows: Rows::new(kernel, unnamed, names),
            generation,
            // Of nftables only connections from outside have counters.
            counts: ebpf::counts(pins).map_err(message),
            hooks: ebpf::query_at(options.cgroup.as_deref(), pins).map_err(message),
            packets,
            forwarding: forwarding(pins).map_err(message),
            process,
        })
    }

    /// The Services that have frontends, as in `default/web`.
    pub(in crate::cli) fn services(&self) -> impl Iterator<Item = &str> {
        self.rows.frontends.iter().map(|(name, _)| &*name.service)
    }

    /// Whether only nftables is programmed, so that no program should be attached.
    pub(super) fn is_nftables_only(&self) -> bool {
        let is_pinned = |it: &AttachStatus| it.hooks.iter().any(|it| it.program.is_some());
        self.generation == Ok(None) && self.packets.is_ok() && !self.hooks.as_ref().is_ok_and(is_pinned)
    }

    pub(super) fn errors(&self) -> Vec<&String> {
        let hooks = self.hooks.as_ref().err().filter(|_| !self.is_nftables_only());
        let maps = [self.generation.as_ref().err(), self.rows.error.as_ref(), self.counts.as_ref().err()];
        let packets = [self.packets.as_ref().err(), self.forwarding.as_ref().err()];
        maps.into_iter().chain([hooks]).chain(packets).flatten().collect()
    }
}

fn forwarding(pins: &Path) -> Result<Option<ForwardSummary>, ebpf::Error> {
    match ebpf::forward_summary(pins) {
        Err(ebpf::Error::NotInitialized(_)) => Ok(None),
        summary => Ok(Some(summary?).filter(ForwardSummary::is_used)),
    }
}

/// An error with its causes.
fn message(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}
