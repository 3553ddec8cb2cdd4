//! Both halves of a node's datapath: the socket path (eBPF) and the packet path (nftables).
//!
//! Invariant: the halves are independent. A failure of the packet path does not keep the socket path from serving.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::{Path, PathBuf},
};

use datapath::{ApplyReport, AttachStatus, TableStats};
use datapath_ebpf::{self as ebpf, UdpTerminator};
use datapath_nft as nft;
use model::{Rejected, error_chain, state::NodeState};

use crate::stale_datapath::StaleDatapath;

/// The subject of reports about the packet path.
const PACKET_PATH: &str = "traffic without a local socket";

/// Which halves there are.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The socket path; `None` if it is off.
    pub sockets: Option<ebpf::Options>,
    /// The packet path; `None` if it is off.
    pub packets: Option<nft::Options>,
    /// Where an earlier start may have pinned the socket path, if it is off now.
    pub stale_pin_dir: Option<PathBuf>,
}

/// The datapath of this node. It continues to serve when this value is dropped.
pub struct Datapath {
    sockets: Option<ebpf::Datapath>,
    packets: Option<nft::Datapath>,
    /// How the packet path should be, if it is on.
    packet_options: Option<nft::Options>,
    /// Why the packet path is on but does not exist.
    unavailable_reason: Option<Rejected>,
    interfaces: BTreeSet<IpAddr>,
    /// Why the packet path is behind the socket path, or was changed externally; it is retried.
    pending_error: Option<Rejected>,
    stale: StaleDatapath,
}

/// Why a half could not be read, written or attached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket path.
    #[error(transparent)]
    Sockets(#[from] ebpf::Error),
    /// The packet path.
    #[error(transparent)]
    Packets(#[from] nft::Error),
}

impl Datapath {
    /// Takes over what exists, or prepares what is missing. Nothing changes before the first state is applied, and what an
    /// earlier instance left serves its last state until then.
    ///
    /// If only the packet path fails, the socket path serves, and every report names what is missing.
    ///
    /// # Errors
    ///
    /// What served before continues to serve.
    pub fn start(options: &Options) -> Result<Self, Error> {
        let sockets = options.sockets.as_ref().map(ebpf::Datapath::start).transpose()?;
        let mut unavailable_reason = None;
        let packets = match options.packets.as_ref().map(nft::Datapath::start).transpose() {
            Err(error) if sockets.is_some() => {
                unavailable_reason = Some(unavailable(&error));
                None
            }
            packets => packets?,
        };
        let stale_pin_dir = options.stale_pin_dir.clone().filter(|_| sockets.is_none());
        Ok(Self {
            sockets,
            packets,
            packet_options: options.packets.clone(),
            unavailable_reason,
            interfaces: BTreeSet::new(),
            pending_error: None,
            stale: StaleDatapath::new(stale_pin_dir, options.packets.is_none()),
        })
    }

    /// Sets the addresses of the host's interfaces, for the next [`Datapath::apply`].
    pub fn set_interfaces(&mut self, addresses: BTreeSet<IpAddr>) {
        self.interfaces.clone_from(&addresses);
        if let Some(packets) = &mut self.packets {
            packets.set_interfaces(addresses.clone());
        }
        if let Some(sockets) = &mut self.sockets {
            sockets.set_interfaces(addresses);
        }
    }

    /// Makes a state active: at one moment for all sockets, and at one moment for all packets.
    ///
    /// # Errors
    ///
    /// A half that fails keeps its previous state; the next call retries. If only the packet path fails, the socket path is
    /// reported, and [`Datapath::pending_error`] names what is missing.
    pub fn apply(&mut self, state: &NodeState) -> Result<ApplyReport, Error> {
        let sockets = self.sockets.as_mut().map(|it| it.apply(state)).transpose();
        let mut packets = self.packets.as_mut().map(|it| it.apply(state)).transpose();
        if let Err(error @ nft::Error::Incapable(_)) = &packets
            && self.sockets.is_some()
        {
            self.unavailable_reason = Some(unavailable(error));
            self.packets = None;
            packets = Ok(None);
        }
        self.pending_error = None;
        let mut report = match (sockets?, packets) {
            (Some(sockets), Ok(Some(packets))) => merge(sockets, packets),
            (Some(sockets), Err(error)) => {
                self.pending_error = Some(pending(&error));
                sockets
            }
            (one, other) => one.or(other?).unwrap_or_default(),
        };
        report.rejected.extend(self.unavailable_reason.iter().chain(&self.pending_error).cloned());
        Ok(report)
    }

    /// Why the packet path still has the state before the last one applied, if it has: apply it again.
    pub fn pending_error(&self) -> Option<&Rejected> {
        self.pending_error.as_ref()
    }

    /// Attaches the programs and repairs the tables, where that is needed.
    ///
    /// # Errors
    ///
    /// What was in effect stays in effect; the next call retries. If only the packet path fails,
    /// [`Datapath::pending_error`] says so.
    pub fn attach(&mut self) -> Result<(), Error> {
        let packets = self.packets.as_mut().map_or(Ok(()), nft::Datapath::repair);
        match (&mut self.sockets, packets) {
            (None, packets) => Ok(packets?),
            (Some(sockets), packets) => {
                if let Err(error) = packets {
                    self.pending_error = Some(pending(&error));
                }
                Ok(sockets.attach()?)
            }
        }
    }

    /// Removes what an earlier start left of a half that is off now. To be called once a state is active; returns what could
    /// not be removed.
    pub fn remove_stale(&mut self) -> Vec<Rejected> {
        self.stale.remove()
    }

    /// Does what can wait until a state is active.
    ///
    /// # Errors
    ///
    /// The active state stays active.
    pub fn finish_generation(&mut self) -> Result<(), Error> {
        // Flows are deleted only once their next packet finds the new state.
        let packets = self
            .packets
            .as_mut()
            .filter(|_| self.pending_error.is_none())
            .map_or(Ok(()), nft::Datapath::finish_generation);
        self.sockets.as_mut().map_or(Ok(()), ebpf::Datapath::finish_generation)?;
        Ok(packets?)
    }

    /// Queries the kernel for what is in effect; `None` before the first state is.
    ///
    /// # Errors
    ///
    /// If the kernel refuses the query. Nothing is changed.
    pub fn attach_status(&mut self) -> Result<Option<AttachStatus>, Error> {
        let tables = self.packets.as_ref().map(nft::Datapath::tables).unwrap_or_default();
        let status = match &mut self.sockets {
            Some(sockets) => sockets.attach_status()?,
            None if tables.is_empty() => None,
            None => Some(AttachStatus { cgroup: "no cgroup".into(), ..AttachStatus::default() }),
        };
        Ok(status.map(|it| AttachStatus { tables, ..it }))
    }

    /// Why the packet path does not serve as it should, if so.
    pub(crate) fn packet_path_error(&self) -> Option<&Rejected> {
        self.unavailable_reason.as_ref().or(self.pending_error.as_ref())
    }

    /// Retries a packet path that was unavailable; returns whether it serves now.
    pub(crate) fn recover(&mut self, state: &NodeState) -> bool {
        let (Some(options), Some(_)) = (&self.packet_options, &self.unavailable_reason) else { return false };
        let packets = nft::Datapath::start(options).and_then(|mut packets| {
            packets.set_interfaces(self.interfaces.clone());
            packets.apply(state)?;
            Ok(packets)
        });
        self.unavailable_reason = packets.as_ref().err().map(unavailable);
        self.packets = packets.ok();
        self.packets.is_some()
    }

    /// The cgroup whose sockets are translated, if the socket path is on.
    pub(crate) fn cgroup(&self) -> Option<&Path> {
        self.sockets.as_ref().map(ebpf::Datapath::cgroup)
    }

    /// What terminates UDP sockets connected to removed endpoints, if the socket path is on.
    pub(crate) fn udp_terminator(&self) -> Result<Option<UdpTerminator>, Error> {
        Ok(self.sockets.as_ref().map(ebpf::Datapath::udp_terminator).transpose()?)
    }

    /// Looks up the excluded cgroups again.
    pub(crate) fn refresh_exclusions(&mut self) -> Result<(), Error> {
        Ok(self.sockets.as_mut().map_or(Ok(()), ebpf::Datapath::refresh_exclusions)?)
    }

    /// The usage of the tables that clients fill, if the socket path is on.
    pub(crate) fn table_stats(&mut self) -> Result<Option<TableStats>, Error> {
        Ok(self.sockets.as_mut().map(ebpf::Datapath::table_stats).transpose()?)
    }

    /// Waits until another program has changed what [`Datapath::attach`] repairs.
    pub(crate) async fn changed_externally(&self) {
        match &self.packets {
            Some(packets) => packets.changed_externally().await,
            None => std::future::pending().await,
        }
    }
}

fn unavailable(error: &nft::Error) -> Rejected {
    Rejected {
        item: PACKET_PATH.into(),
        reason: format!(
            "{}; the socket path serves without it; retried until the cause is fixed",
            error_chain(error)
        ),
    }
}

fn pending(error: &nft::Error) -> Rejected {
    Rejected {
        item: PACKET_PATH.into(),
        reason: format!("{}; its previous state stays active; retried", error_chain(error)),
    }
}

/// One report for both halves, of the same state.
fn merge(sockets: ApplyReport, packets: ApplyReport) -> ApplyReport {
    let mut rejected: BTreeSet<_> = sockets.rejected.into_iter().collect();
    rejected.extend(packets.rejected);
    ApplyReport {
        changed_services: sockets.changed_services.max(packets.changed_services),
        services: sockets.services,
        entries: sockets.entries + packets.entries,
        flipped: sockets.flipped || packets.flipped,
        is_full: sockets.is_full,
        tables: sockets.tables.into_iter().chain(packets.tables).collect(),
        rejected: rejected.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    fn an_unavailable_packet_path_recovers() {
        // In a network namespace that ends with its thread.
        let test = thread::spawn(|| {
            if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
                eprintln!("skipped: no network namespace can be created: {error}");
                return;
            }
            let reason = Rejected { item: "packets".into(), reason: "it failed before".into() };
            let mut datapath = Datapath {
                sockets: None,
                packets: None,
                packet_options: Some(nft::Options::default()),
                unavailable_reason: Some(reason.clone()),
                interfaces: BTreeSet::new(),
                pending_error: None,
                stale: StaleDatapath::new(None, false),
            };
            let state = NodeState::default();
            assert_eq!(datapath.apply(&state).unwrap().rejected, [reason]);
            assert!(datapath.recover(&state));
            assert_eq!(datapath.packet_path_error(), None);
            assert_eq!(datapath.apply(&state).unwrap().rejected, []);
            assert!(datapath.attach_status().unwrap().unwrap().is_complete());
            assert!(!datapath.recover(&state), "it had recovered already");
        });
        test.join().unwrap();
    }
}
