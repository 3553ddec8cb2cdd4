//! Both halves of a node's datapath: the socket path (eBPF) and the packet path (nftables).
//!
//! Invariant: the halves are independent. The socket path neither waits for the packet path nor fails with it.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::{Path, PathBuf},
};

use datapath::{ApplyReport, AttachStatus, TableStats};
use datapath_ebpf::{self as ebpf, CgroupEvents, SocketTerminator, TracedPrograms};
use datapath_nft as nft;
use datapath_userspace as userspace;
use model::{Rejected, state::NodeState};

use crate::{packet_path::Packets, stale_datapath::StaleDatapath};

/// Which halves there are.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The socket path; `None` if it is off.
    pub sockets: Option<ebpf::Options>,
    /// The packet path; `None` if it is off.
    pub packets: Option<nft::Options>,
    /// A datapath of ordinary sockets, instead of both halves; see [`run_userspace`](crate::run_userspace).
    pub userspace: Option<userspace::Options>,
    /// Where an earlier start may have pinned the socket path, if it is off now.
    pub stale_pin_dir: Option<PathBuf>,
}

/// The datapath of this node. It continues to serve when this value is dropped.
pub struct Datapath {
    /// The socket path.
    pub(crate) sockets: Sockets,
    /// The packet path; `None` if it is off.
    pub(crate) packets: Option<Packets>,
}

/// The socket path, and what an earlier start left of a half that is off now.
pub(crate) struct Sockets {
    /// `None` if it is off.
    datapath: Option<ebpf::Datapath>,
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

impl Options {
    /// What of the configuration has no effect or a surprising one, and why.
    pub fn remarks(&self) -> impl Iterator<Item = &'static str> {
        let masquerades_all = self.packets.as_ref().is_some_and(|it| it.config.masquerade_all);
        let sources = (self.sockets.is_some() && masquerades_all).then_some(
            "--masquerade-all has no effect on sockets that eBPF redirects: their packets go straight to the endpoint, with \
             their own source; --backend nft masquerades all",
        );
        let honors_annotations = self.sockets.as_ref().is_some_and(|it| it.pod_annotations);
        let pods = (honors_annotations && self.packets.is_none()).then_some(
            "--pod-annotations: sockets that pods leave to packets reach no Service, because the packet path is off (--packets)",
        );
        sources.into_iter().chain(pods)
    }
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
        let connected = sockets.as_ref().map(ebpf::Datapath::connected_backends).transpose()?;
        let packets = options.packets.as_ref().map(|it| Packets::start(it, connected)).transpose()?;
        let stale_pin_dir = options.stale_pin_dir.clone().filter(|_| sockets.is_none());
        let stale = StaleDatapath::new(stale_pin_dir, options.packets.is_none());
        Ok(Self { sockets: Sockets { datapath: sockets, stale }, packets })
    }
}

impl Sockets {
    /// Whether the socket path is on.
    pub(crate) fn is_on(&self) -> bool {
        self.datapath.is_some()
    }

    /// Sets the addresses of the host's interfaces, for the next [`Sockets::apply`].
    pub(crate) fn set_interfaces(&mut self, addresses: BTreeSet<IpAddr>) {
        if let Some(sockets) = &mut self.datapath {
            sockets.set_interfaces(addresses);
        }
    }

    /// Says whether the packet path translates what sockets leave to it.
    ///
    /// # Errors
    ///
    /// What was said before holds.
    pub(crate) fn set_packets_serve(&mut self, serve: bool) -> Result<(), Error> {
        Ok(self.datapath.as_mut().map_or(Ok(()), |it| it.set_packets_serve(serve))?)
    }

    /// Makes a state active, at one moment for all sockets; `None` if the socket path is off.
    ///
    /// # Errors
    ///
    /// The previous state stays active; the next call retries.
    pub(crate) fn apply(&mut self, state: &NodeState) -> Option<Result<ApplyReport, Error>> {
        Some(self.datapath.as_mut()?.apply(state).map_err(Error::Sockets))
    }

    /// Attaches the programs, where that is needed.
    ///
    /// # Errors
    ///
    /// What was in effect stays in effect; the next call retries.
    pub(crate) fn attach(&mut self) -> Result<(), Error> {
        Ok(self.datapath.as_mut().map_or(Ok(()), ebpf::Datapath::attach)?)
    }

    /// Removes what an earlier start left of a half that is off now. To be called once a state is active; returns what could
    /// not be removed.
    pub(crate) fn remove_stale(&mut self) -> Vec<Rejected> {
        self.stale.remove()
    }

    /// Whether [`Sockets::remove_stale`] has something to do.
    pub(crate) fn has_stale(&self) -> bool {
        !self.stale.is_removed()
    }

    /// Does what can wait until a state is active.
    ///
    /// # Errors
    ///
    /// The active state stays active.
    pub(crate) fn finish_generation(&mut self) -> Result<(), Error> {
        Ok(self.datapath.as_mut().map_or(Ok(()), ebpf::Datapath::finish_generation)?)
    }

    /// Queries the kernel for what is in effect, beside these tables; `None` before the first state is.
    ///
    /// # Errors
    ///
    /// If the kernel refuses the query. Nothing is changed.
    pub(crate) fn attach_status(
        &mut self,
        tables: Vec<(&'static str, bool)>,
    ) -> Result<Option<AttachStatus>, Error> {
        let status = match &mut self.datapath {
            Some(sockets) => sockets.attach_status()?,
            None if tables.is_empty() => None,
            None => Some(AttachStatus { cgroup: "no cgroup".into(), ..AttachStatus::default() }),
        };
        Ok(status.map(|it| AttachStatus { tables, ..it }))
    }

    /// Attaches the programs of a trace instead of the product's.
    ///
    /// # Errors
    ///
    /// The product's programs stay attached.
    pub(crate) fn begin_trace(&mut self, programs: TracedPrograms) -> Result<(), Error> {
        Ok(self.datapath.as_mut().map_or(Err(ebpf::Error::NotAttached), |it| it.begin_trace(programs))?)
    }

    /// Attaches the product's programs again.
    pub(crate) fn end_trace(&mut self) {
        if let Some(datapath) = &mut self.datapath {
            datapath.end_trace();
        }
    }

    /// The cgroup whose sockets are translated, if the socket path is on.
    pub(crate) fn cgroup(&self) -> Option<&Path> {
        self.datapath.as_ref().map(ebpf::Datapath::cgroup)
    }

    /// What terminates sockets connected to removed endpoints, if the socket path is on.
    pub(crate) fn socket_terminator(&self) -> Result<Option<SocketTerminator>, Error> {
        Ok(self.datapath.as_ref().map(ebpf::Datapath::socket_terminator).transpose()?)
    }

    /// Looks up the excluded cgroups again.
    pub(crate) fn refresh_exclusions(&mut self) -> Result<(), Error> {
        Ok(self.datapath.as_mut().map_or(Ok(()), ebpf::Datapath::refresh_exclusions)?)
    }

    /// Notifications of cgroups that may be excluded, if there are any. Must be called within a tokio runtime.
    pub(crate) fn cgroup_events(&self) -> Option<CgroupEvents> {
        self.datapath.as_ref()?.cgroup_events()
    }

    /// Tries ejected endpoints. To be called every second.
    ///
    /// # Errors
    ///
    /// Clients try them then.
    pub(crate) fn try_ejected(&mut self) -> Result<(), Error> {
        Ok(self.datapath.as_mut().map_or(Ok(()), ebpf::Datapath::try_ejected)?)
    }

    /// The usage of the tables that clients fill, if the socket path is on.
    pub(crate) fn table_stats(&mut self) -> Result<Option<TableStats>, Error> {
        Ok(self.datapath.as_mut().map(ebpf::Datapath::table_stats).transpose()?)
    }
}
