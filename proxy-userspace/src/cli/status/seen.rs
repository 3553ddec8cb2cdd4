//! The state of the kernel and of the running process.

use std::{io, mem};

use anyhow::Result;
use datapath::{ActiveFrontend, AttachStatus, FrontendAddress};
use datapath_ebpf::{self as ebpf, ActiveFrontends, Counts, Options};
use datapath_nft as nft;

use super::{
    names::{NamedFrontend, Names, PortName},
    process::Process,
};

/// The state at one time. What cannot be read is an error text.
pub(super) struct Seen {
    pub(super) rows: Rows,
    /// The generation of the eBPF maps; `None` without eBPF maps.
    pub(super) generation: Result<Option<u32>, String>,
    pub(super) counts: Result<Counts, String>,
    pub(super) hooks: Result<AttachStatus, String>,
    pub(super) packets: Result<String, String>,
    pub(super) process: Process,
}

/// The frontends, read one by one.
pub(super) struct Rows {
    /// Those that the process names, sorted by name, after those that are in the kernel and have no name.
    frontends: Vec<NamedFrontend>,
    kernel: Frontends,
    /// Why one could not be read.
    pub(super) error: Option<String>,
}

impl Rows {
    fn new(mut kernel: Frontends, names: Names) -> Self {
        let unnamed = kernel.addresses(|it| names.get(it).is_none());
        let error = unnamed.as_ref().err().cloned();
        let unnamed = unnamed.unwrap_or_default().into_iter();
        let mut frontends: Vec<_> = unnamed.map(NamedFrontend::unnamed).collect();
        frontends.sort_by_cached_key(|it| it.address.to_string());
        frontends.extend(names.into_sorted());
        Self { frontends, kernel, error }
    }

    /// All that the kernel has, each with its number and its name.
    ///
    /// # Errors
    ///
    /// Those of the callback.
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

    /// A frontend by its number, with its name.
    pub(super) fn get(&mut self, number: usize) -> Option<(&PortName, ActiveFrontend)> {
        let NamedFrontend { name, address, .. } = self.frontends.get(number)?;
        let found = self.kernel.get(address).unwrap_or_else(|error| {
            self.error = Some(error);
            None
        });
        Some((name, found?))
    }
}

/// The frontends in the kernel.
enum Frontends {
    /// Those of eBPF are looked up one by one.
    Sockets(Box<ActiveFrontends>),
    /// Those of nftables, which has no order, are sorted.
    Packets(Vec<ActiveFrontend>),
}

impl Frontends {
    /// The addresses of those that are wanted.
    fn addresses(
        &mut self,
        is_wanted: impl Fn(&FrontendAddress) -> bool,
    ) -> Result<Vec<FrontendAddress>, String> {
        match self {
            Self::Sockets(it) => it.addresses(is_wanted).map_err(message),
            Self::Packets(all) => {
                Ok(all.iter().filter_map(|it| it.frontend.parse().ok()).filter(is_wanted).collect())
            }
        }
    }

    fn get(&mut self, address: &FrontendAddress) -> Result<Option<ActiveFrontend>, String> {
        match self {
            Self::Sockets(it) => it.get(address).map_err(message),
            Self::Packets(all) => {
                let found = all.binary_search_by(|it| it.frontend.cmp(&address.to_string()));
                Ok(found.ok().map(|it| all[it].clone()))
            }
        }
    }
}

impl Seen {
    /// Reads the eBPF datapath, and nftables. The frontends are those of nftables if there are no eBPF maps.
    ///
    /// # Errors
    ///
    /// If neither datapath has been programmed.
    pub(super) fn read(options: &Options, mut process: Process) -> Result<Self> {
        let pins = &options.pin_dir;
        let sockets = ActiveFrontends::open(pins).and_then(|it| Ok((it, ebpf::generation(pins)?)));
        let (kernel, generation) = match sockets {
            Ok((frontends, generation)) => (Frontends::Sockets(Box::new(frontends)), Ok(Some(generation))),
            Err(error) => {
                // An error of nftables is reported by `packets` below.
                let packets = nft::active_frontends();
                let generation = match error {
                    ebpf::Error::NotInitialized(_) if packets.as_ref().is_ok_and(Vec::is_empty) => {
                        return Err(error.into());
                    }
                    ebpf::Error::NotInitialized(_) => Ok(None),
                    error => Err(message(error)),
                };
                (Frontends::Packets(packets.unwrap_or_default()), generation)
            }
        };
        let packets = match nft::check::tables(matches!(generation, Ok(Some(_)))) {
            Ok(finding) => Ok(finding.says),
            // A kernel without nftables is a result, not a failure to read.
            Err(error) if error.is_nftables_missing() => Ok(message(error)),
            Err(error) => Err(message(error)),
        };
        let rows = Rows::new(kernel, mem::take(&mut process.names));
        Ok(Self {
            rows,
            generation,
            // nftables has no counters per Service.
            counts: ebpf::counts(pins).map_err(message),
            hooks: ebpf::query_at(options.cgroup.as_deref(), pins).map_err(message),
            packets,
            process,
        })
    }

    /// Whether only nftables is programmed, so that no program should be attached.
    pub(super) fn is_nftables_only(&self) -> bool {
        let is_pinned = |it: &AttachStatus| it.hooks.iter().any(|it| it.program.is_some());
        self.generation == Ok(None) && self.packets.is_ok() && !self.hooks.as_ref().is_ok_and(is_pinned)
    }

    /// Why something could not be read.
    pub(super) fn errors(&self) -> Vec<&String> {
        let hooks = self.hooks.as_ref().err().filter(|_| !self.is_nftables_only());
        let maps = [self.generation.as_ref().err(), self.rows.error.as_ref(), self.counts.as_ref().err()];
        maps.into_iter().chain([hooks, self.packets.as_ref().err()]).flatten().collect()
    }
}

/// An error with its causes.
fn message(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}
