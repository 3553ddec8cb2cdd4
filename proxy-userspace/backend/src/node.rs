//! Both halves of a node's data plane: sockets by eBPF, packets by nftables.
//!
//! The one rule: each half is whole by itself. What one of them cannot do does not keep the other from serving.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::{Path, PathBuf},
};

use model::{Rejected, state::NodeState};

use crate::{
    agent::chain,
    ebpf::{self, Ender, Hooks, Memory, Report},
    former::Former,
    nft,
};

/// Which halves there are.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How sockets are translated; none if they are not.
    pub sockets: Option<ebpf::Options>,
    /// How packets are translated; none if they are not.
    pub packets: Option<nft::Options>,
    /// Where sockets' programs may be pinned since an earlier start, if sockets are not translated any more.
    pub former_pins: Option<PathBuf>,
}

/// The data plane of this node. It goes on serving when this value is dropped.
pub struct Node {
    sockets: Option<ebpf::Node>,
    packets: Option<nft::Node>,
    /// How packets should be translated, if they should.
    wanted: Option<nft::Options>,
    /// Why packets are not translated though they should be; only while there is no half for them.
    lacking: Option<Rejected>,
    interfaces: BTreeSet<IpAddr>,
    /// Why packets are not where sockets are, or not as they were written; they are tried again.
    behind: Option<Rejected>,
    former: Former,
}

/// Why a half could not be read, written or put in place.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// At sockets.
    #[error(transparent)]
    Sockets(#[from] ebpf::Error),
    /// At packets.
    #[error(transparent)]
    Packets(#[from] nft::Error),
}

impl Node {
    /// Takes over what is there, or prepares what is missing. Nothing is changed before the first state is applied, and
    /// what an earlier instance left goes on serving its last state.
    ///
    /// Where sockets can be served and packets cannot, sockets are, and what is missing is in every report.
    ///
    /// # Errors
    ///
    /// Whatever served before goes on serving.
    pub fn start(options: &Options) -> Result<Self, Error> {
        let sockets = options.sockets.as_ref().map(ebpf::Node::start).transpose()?;
        let mut lacking = None;
        let packets = match options.packets.as_ref().map(nft::Node::start) {
            None => None,
            Some(Ok(packets)) => Some(packets),
            Some(Err(error)) if sockets.is_some() => {
                lacking = Some(self::lacking(&error));
                None
            }
            Some(Err(error)) => return Err(error.into()),
        };
        let wanted = options.packets.clone();
        let (interfaces, former) = (BTreeSet::new(), Former::of(options));
        Ok(Self { sockets, packets, wanted, lacking, interfaces, behind: None, former })
    }

    /// Tells which addresses the host's interfaces have; counts from the next [`Node::apply`] on.
    pub fn set_interfaces(&mut self, addresses: BTreeSet<IpAddr>) {
        self.interfaces.clone_from(&addresses);
        if let Some(packets) = &mut self.packets {
            packets.set_interfaces(addresses.clone());
        }
        if let Some(sockets) = &mut self.sockets {
            sockets.set_interfaces(addresses);
        }
    }

    /// Brings a state into force, at one moment for all sockets, and at one moment for all packets.
    ///
    /// # Errors
    ///
    /// What was in force in a half that fails stays in force; the next call tries again. Where only packets fail, sockets
    /// have their report, and [`Node::behind`] says what is missing.
    pub fn apply(&mut self, state: &NodeState) -> Result<Report, Error> {
        let sockets = self.sockets.as_mut().map(|it| it.apply(state)).transpose();
        let mut packets = self.packets.as_mut().map(|it| it.apply(state)).transpose();
        if let Err(error @ nft::Error::Incapable(_)) = &packets
            && self.sockets.is_some()
        {
            self.lacking = Some(lacking(error));
            self.packets = None;
            packets = Ok(None);
        }
        self.behind = None;
        let mut report = match (sockets?, packets) {
            (Some(sockets), Ok(Some(packets))) => join(sockets, packets),
            (Some(sockets), Err(error)) => {
                self.behind = Some(behind(&error));
                sockets
            }
            (one, other) => one.or(other?).unwrap_or_default(),
        };
        report.rejected.extend(self.lacking.iter().chain(&self.behind).cloned());
        Ok(report)
    }

    /// Why packets still go by the state before the one that was applied last, if they do: it is to be applied again.
    pub fn behind(&self) -> Option<&Rejected> {
        self.behind.as_ref()
    }

    /// Sees to it that what was applied is in effect.
    ///
    /// # Errors
    ///
    /// Whatever was in effect stays so; the next call tries again. Where only packets fail, [`Node::behind`] says so.
    pub fn attach(&mut self) -> Result<(), Error> {
        let packets = self.packets.as_mut().map_or(Ok(()), nft::Node::uphold);
        match (&mut self.sockets, packets) {
            (None, packets) => Ok(packets?),
            (Some(sockets), packets) => {
                if let Err(error) = packets {
                    self.behind = Some(behind(&error));
                }
                Ok(sockets.attach()?)
            }
        }
    }

    /// Takes away what an earlier start has left that translated what is not translated now. To be called once a state is
    /// in effect; returns what could not be taken away.
    pub fn retire(&mut self) -> Vec<Rejected> {
        self.former.remove()
    }

    /// Does what can wait until a state is in force.
    ///
    /// # Errors
    ///
    /// What is in force stays so.
    pub fn settle(&mut self) -> Result<(), Error> {
        // Flows are ended once there is another way for them.
        let packets =
            self.packets.as_mut().filter(|_| self.behind.is_none()).map_or(Ok(()), nft::Node::settle);
        self.sockets.as_mut().map_or(Ok(()), ebpf::Node::settle)?;
        Ok(packets?)
    }

    /// Asks what is in effect; `None` before the first state is.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to tell. Nothing is changed.
    pub fn look(&mut self) -> Result<Option<Hooks>, Error> {
        let tables = self.packets.as_ref().map(nft::Node::tables).unwrap_or_default();
        let hooks = match &mut self.sockets {
            Some(sockets) => sockets.look()?,
            None if tables.is_empty() => None,
            None => Some(Hooks { cgroup: "no cgroup".into(), ..Hooks::default() }),
        };
        Ok(hooks.map(|it| Hooks { tables, ..it }))
    }

    /// Why packets are not translated as they should be, if so.
    pub(crate) fn lacking(&self) -> Option<&Rejected> {
        self.lacking.as_ref().or(self.behind.as_ref())
    }

    /// Tries again to translate packets where that could not be done; whether it is done now.
    pub(crate) fn recover(&mut self, state: &NodeState) -> bool {
        let (Some(options), Some(_)) = (&self.wanted, &self.lacking) else { return false };
        let packets = nft::Node::start(options).and_then(|mut packets| {
            packets.set_interfaces(self.interfaces.clone());
            packets.apply(state)?;
            Ok(packets)
        });
        match packets {
            Ok(packets) => {
                self.packets = Some(packets);
                self.lacking = None;
                true
            }
            Err(error) => {
                self.lacking = Some(lacking(&error));
                false
            }
        }
    }

    /// The cgroup whose sockets are translated, if they are.
    pub(crate) fn cgroup(&self) -> Option<&Path> {
        self.sockets.as_ref().map(ebpf::Node::cgroup)
    }

    /// What ends the flows of sockets that have no place to go any more, if sockets are translated.
    pub(crate) fn ender(&self) -> Result<Option<Ender>, Error> {
        Ok(self.sockets.as_ref().map(ebpf::Node::ender).transpose()?)
    }

    /// Looks for the cgroups whose processes are left alone.
    pub(crate) fn exclude(&mut self) -> Result<(), Error> {
        Ok(self.sockets.as_mut().map_or(Ok(()), ebpf::Node::exclude)?)
    }

    /// Says how much is remembered for sockets and clients, if sockets are translated.
    pub(crate) fn memory(&mut self) -> Result<Option<Memory>, Error> {
        Ok(self.sockets.as_mut().map(ebpf::Node::memory).transpose()?)
    }

    /// Waits until there is something to be put back by [`Node::attach`].
    pub(crate) async fn disturbed(&self) {
        match &self.packets {
            Some(packets) => packets.disturbed().await,
            None => std::future::pending().await,
        }
    }
}

/// What is said of packets where nobody can translate them.
fn lacking(error: &nft::Error) -> Rejected {
    Rejected {
        item: "traffic that has no socket here".into(),
        reason: format!("{}; mend it, it is tried again; sockets are served all the same", chain(error)),
    }
}

/// What is said of packets while they cannot be brought to where sockets are.
fn behind(error: &nft::Error) -> Rejected {
    Rejected {
        item: "traffic that has no socket here".into(),
        reason: format!("{}; it goes by the state before, and is tried again", chain(error)),
    }
}

/// Reports of the same state.
fn join(sockets: Report, packets: Report) -> Report {
    let mut rejected: BTreeSet<_> = sockets.rejected.into_iter().collect();
    rejected.extend(packets.rejected);
    Report {
        changed_services: sockets.changed_services.max(packets.changed_services),
        services: sockets.services,
        entries: sockets.entries + packets.entries,
        flipped: sockets.flipped || packets.flipped,
        whole: sockets.whole,
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
    fn packets_are_served_as_soon_as_they_can_be() {
        // In a network namespace that goes away with its thread.
        let test = thread::spawn(|| {
            if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
                eprintln!("skipped: no network namespace can be made: {error}");
                return;
            }
            let lacking = Rejected { item: "packets".into(), reason: "it could not be done before".into() };
            let mut node = Node {
                sockets: None,
                packets: None,
                wanted: Some(nft::Options::default()),
                lacking: Some(lacking.clone()),
                interfaces: BTreeSet::new(),
                behind: None,
                former: Former::of(&Options { packets: Some(nft::Options::default()), ..Options::default() }),
            };
            let state = NodeState::default();
            assert_eq!(node.apply(&state).unwrap().rejected, [lacking]);
            assert!(node.recover(&state));
            assert_eq!(node.lacking(), None);
            assert_eq!(node.apply(&state).unwrap().rejected, []);
            assert!(node.look().unwrap().unwrap().are_in_effect());
            assert!(!node.recover(&state), "it was done already");
        });
        test.join().unwrap();
    }
}
