//! The state of the kernel and of the running process.

use anyhow::Result;
use datapath::{ActiveFrontend, AttachStatus};
use datapath_ebpf::{self as ebpf, Counts, Options};
use datapath_nft as nft;

use super::process::{PortName, Process};

/// The state at one time. What cannot be read is an error text.
pub(super) struct Seen {
    pub(super) frontends: Vec<ActiveFrontend>,
    /// The generation of the eBPF maps; `None` without eBPF maps.
    pub(super) generation: Result<Option<u32>, String>,
    pub(super) counts: Result<Counts, String>,
    pub(super) hooks: Result<AttachStatus, String>,
    pub(super) packets: Result<String, String>,
    pub(super) process: Process,
}

impl Seen {
    /// Reads the eBPF datapath, and nftables. The frontends are those of nftables if there are no eBPF maps.
    ///
    /// # Errors
    ///
    /// If neither datapath has been programmed.
    pub(super) fn read(options: &Options, process: Process) -> Result<Self> {
        let pins = &options.pin_dir;
        let sockets =
            ebpf::active_frontends(pins).and_then(|frontends| Ok((frontends, ebpf::generation(pins)?)));
        let (frontends, generation) = match sockets {
            Ok((frontends, generation)) => (frontends, Ok(Some(generation))),
            Err(error) => {
                // An error of nftables is reported by `packets` below.
                let packets = nft::active_frontends();
                match error {
                    ebpf::Error::NotInitialized(_) if packets.as_ref().is_ok_and(Vec::is_empty) => {
                        return Err(error.into());
                    }
                    ebpf::Error::NotInitialized(_) => (packets.unwrap_or_default(), Ok(None)),
                    error => (packets.unwrap_or_default(), Err(message(error))),
                }
            }
        };
        let packets = match nft::check::tables(matches!(generation, Ok(Some(_)))) {
            Ok(finding) => Ok(finding.says),
            // A kernel without nftables is a result, not a failure to read.
            Err(error) if error.is_nftables_missing() => Ok(message(error)),
            Err(error) => Err(message(error)),
        };
        Ok(Self {
            frontends,
            generation,
            // nftables has no counters per Service.
            counts: ebpf::counts(pins).map_err(message),
            hooks: ebpf::query_at(options.cgroup.as_deref(), pins).map_err(message),
            packets,
            process,
        })
    }

    /// The frontends with their names, sorted by name.
    pub(super) fn rows(&self) -> Vec<(PortName, &ActiveFrontend)> {
        let name = |it: &ActiveFrontend| self.process.names.get(&it.frontend).cloned().unwrap_or_default();
        let mut rows: Vec<_> = self.frontends.iter().map(|it| (name(it), it)).collect();
        rows.sort_by(|(a, _), (b, _)| (&a.service, &a.port).cmp(&(&b.service, &b.port)));
        rows
    }

    /// Whether only nftables is programmed, so that no program should be attached.
    pub(super) fn is_nftables_only(&self) -> bool {
        let is_pinned = |it: &AttachStatus| it.hooks.iter().any(|it| it.program.is_some());
        self.generation == Ok(None) && self.packets.is_ok() && !self.hooks.as_ref().is_ok_and(is_pinned)
    }

    /// Why something could not be read.
    pub(super) fn errors(&self) -> Vec<&String> {
        let hooks = self.hooks.as_ref().err().filter(|_| !self.is_nftables_only());
        let maps = [self.generation.as_ref().err(), self.counts.as_ref().err()];
        maps.into_iter().chain([hooks, self.packets.as_ref().err()]).flatten().collect()
    }
}

/// An error with its causes.
fn message(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}
