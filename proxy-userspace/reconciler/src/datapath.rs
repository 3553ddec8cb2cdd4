//! Both halves of a node's datapath: the socket path (eBPF) and the packet path (nftables), and what an earlier start left of them.
//!
//! Invariant: the halves are independent. The socket path neither waits for the packet path nor fails with it.

use std::path::{Path, PathBuf};

use datapath_ebpf as ebpf;
use datapath_nft as nft;
use model::{Rejected, error_chain};
use nix::errno::Errno;

use crate::packets::Packets;

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
    // `None` for a half that is off.
    pub(crate) sockets: Option<ebpf::Datapath>,
    pub(crate) packets: Option<Packets>,
    pub(crate) stale: StaleDatapath,
}

/// Why a half could not be read, written or attached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Sockets(#[from] ebpf::Error),
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
        let mut sockets = options.sockets.as_ref().map(ebpf::Datapath::start).transpose()?;
        let connected = sockets.as_ref().map(ebpf::Datapath::connected_backends).transpose()?;
        let mut packets = options.packets.clone();
        if let (Some(packets), Some(sockets)) = (&mut packets, &mut sockets) {
            packets.forwarded_families = sockets.forwarded_families();
        }
        let packets = packets.as_ref().map(|it| Packets::start(it, connected)).transpose()?;
        let pin_dir = options.stale_pin_dir.clone().filter(|_| sockets.is_none());
        let stale = StaleDatapath { pin_dir, tables: options.packets.is_none() };
        Ok(Self { sockets, packets, stale })
    }
}

/// What an earlier start with other options left and has not been removed yet: attached programs or nftables tables that no process
/// updates any more. It is removed only once its replacement is in effect.
#[derive(Debug, Default)]
pub(crate) struct StaleDatapath {
    /// Where programs and maps may be pinned.
    pin_dir: Option<PathBuf>,
    /// Whether there may be nftables tables.
    tables: bool,
}

impl StaleDatapath {
    pub(crate) fn is_removed(&self) -> bool {
        self.pin_dir.is_none() && !self.tables
    }

    /// Removes it; returns what could not be removed, which the next call retries.
    pub(crate) fn remove(&mut self) -> Vec<Rejected> {
        let mut rejected = Vec::new();
        if let Some(dir) = &self.pin_dir {
            match remove_programs(dir) {
                Ok(()) => self.pin_dir = None,
                Err(error) => rejected.push(Rejected::served(
                    format!("the socket path: programs pinned at {} still use an old state", dir.display()),
                    format!("{}; run `cleanup` as root, once", error_chain(&error)),
                )),
            }
        }
        if self.tables {
            match remove_tables() {
                Ok(()) => self.tables = false,
                Err(error) => rejected.push(Rejected::served(
                    "the packet path: our nftables tables still hold an old state",
                    format!("{}; run `cleanup` as root, once", error_chain(&error)),
                )),
            }
        }
        rejected
    }
}

fn remove_programs(dir: &Path) -> Result<(), ebpf::Error> {
    if ebpf::cleanup(dir)? {
        tracing::info!(path = %dir.display(), "the socket path is off: its programs and maps were removed");
    }
    Ok(())
}

fn remove_tables() -> Result<(), nft::Error> {
    match nft::cleanup() {
        Ok(true) => tracing::info!("the packet path is off: its nftables tables were removed"),
        // Without nftables there is no table of ours.
        Ok(false) | Err(nft::Error::Open(_) | nft::Error::Read { errno: Errno::EOPNOTSUPP, .. }) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}
