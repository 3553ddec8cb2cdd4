//! The packet path (nftables) as a datapath of a worker.
//!
//! Invariant: beside the socket path it may be unavailable. It then counts as active, with the reason, and is opened again
//! once the cause is fixed.

use std::{collections::BTreeSet, future::pending, mem, net::SocketAddr, time::Duration};

use datapath::{ApplyReport, AvoidedEndpoints, PacketAffinity};
use datapath_ebpf::ConnectedBackends;
use datapath_nft as nft;
use model::{Family, Rejected, error_chain};
use tokio::time::Instant;

use crate::worker::{Datapath, Desired, Next};

/// The subject of reports about the packet path.
const PACKET_PATH: &str = "traffic without a local socket";
/// Delay of the second pass over conntrack: packets that were on their way have left the host by then.
const SECOND_PASS_DELAY: Duration = Duration::from_secs(1);
const UPKEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Maintenance takes at most this part of the time: the kernel lists a set from its beginning for each page.
const UPKEEP_SHARE: u32 = 20;
/// Interval between attempts to open an unavailable packet path.
const RECOVER_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Packets {
    options: nft::Options,
    /// The datapath, or why it is unavailable, which it may be only beside the socket path.
    datapath: Result<nft::Datapath, Rejected>,
    /// The backends that sockets are connected to, beside the socket path.
    connected: Option<ConnectedBackends>,
    avoided: AvoidedEndpoints,
    /// Whether the newest state is in the tables.
    is_current: bool,
    /// The removed UDP endpoints for which sockets were looked through.
    known_removed_udp: BTreeSet<SocketAddr>,
    /// Why stale flows could not be deleted.
    flows: Result<(), nft::Error>,
    recover_at: Instant,
    second_pass_at: Option<Instant>,
    upkeep_at: Instant,
}

/// The findings of background maintenance.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Upkeep {
    /// The clients with session affinity; `None` if no Service has session affinity.
    pub(crate) affinity: Option<PacketAffinity>,
    pub(crate) has_kube_proxy_rules: bool,
}

#[derive(Debug)]
pub(crate) struct PacketCondition {
    /// Why it is unavailable.
    pub(crate) unavailable: Option<Rejected>,
    /// Tables, and whether each is intact.
    pub(crate) tables: Vec<(&'static str, bool)>,
    /// The families in which connections that it does not know get a second chance.
    pub(crate) second_chance: Vec<Family>,
}

impl Packets {
    /// Opens nftables; nothing changes before the first state is applied. Fails only where no socket path serves without it.
    pub(crate) fn start(
        options: &nft::Options,
        connected: Option<ConnectedBackends>,
    ) -> Result<Self, nft::Error> {
        let datapath = match nft::Datapath::start(options) {
            Ok(datapath) => Ok(datapath),
            Err(error) if options.is_beside_sockets => Err(unavailable(&error)),
            Err(error) => return Err(error),
        };
        let now = Instant::now();
        Ok(Self {
            options: options.clone(),
            datapath,
            connected,
            avoided: AvoidedEndpoints::default(),
            is_current: false,
            known_removed_udp: BTreeSet::new(),
            flows: Ok(()),
            recover_at: now + RECOVER_INTERVAL,
            second_pass_at: None,
            upkeep_at: now + UPKEEP_INTERVAL,
        })
    }

    pub(crate) fn unavailable(&self) -> Option<&Rejected> {
        self.datapath.as_ref().err()
    }

    /// Tries to open an unavailable packet path.
    fn recover(&mut self) -> Next {
        self.recover_at = Instant::now() + RECOVER_INTERVAL;
        match nft::Datapath::start(&self.options) {
            Ok(datapath) => {
                self.datapath = Ok(datapath);
                Next::Apply
            }
            Err(error) => {
                self.datapath = Err(unavailable(&error));
                Next::Repair
            }
        }
    }

    /// Deletes the flows that the first pass could not see; failures are left to the flows' timeouts.
    fn second_pass(&mut self) {
        let Ok(datapath) = &mut self.datapath else { return };
        if let Err(error) = datapath.finish_generation_again() {
            tracing::warn!(error = error_chain(&error), "a second pass over conntrack failed");
        }
        if let Err(error) = refuse_removed_udp(datapath, self.connected.as_ref()) {
            tracing::warn!(error = error_chain(&error), "removed UDP endpoints are not refused");
        }
    }

    /// Removes expired UDP-reject rules, counts the clients with session affinity, and looks for kube-proxy's rules; failures
    /// are retried the next time.
    fn upkeep(&mut self) -> (Upkeep, Next) {
        let Ok(datapath) = &mut self.datapath else { return (Upkeep::default(), Next::Wait) };
        let refused = refuse_removed_udp(datapath, self.connected.as_ref());
        if let Err(error) = &refused {
            tracing::debug!(error = error_chain(error), "the rules for removed UDP endpoints stay");
        }
        let affinity = datapath.count_affinity().unwrap_or_else(|error| {
            tracing::debug!(error = error_chain(&error), "clients with session affinity cannot be counted");
            None
        });
        let has_kube_proxy_rules = datapath.has_kube_proxy_rules().unwrap_or_else(|error| {
            tracing::debug!(error = error_chain(&error), "kube-proxy's rules cannot be looked for");
            false
        });
        let next = if refused.is_err() { Next::Repair } else { Next::Wait };
        (Upkeep { affinity, has_kube_proxy_rules }, next)
    }
}

impl Datapath for Packets {
    const NAME: &str = "packets";
    /// The endpoints that packets avoid.
    type Request = AvoidedEndpoints;
    type Finding = Upkeep;
    type Condition = PacketCondition;
    type Error = nft::Error;

    fn apply(&mut self, desired: &Desired) -> Result<ApplyReport, nft::Error> {
        let datapath = match &mut self.datapath {
            Ok(datapath) => datapath,
            Err(reason) => {
                return Ok(ApplyReport { rejected: vec![reason.clone()], ..ApplyReport::default() });
            }
        };
        datapath.set_interfaces(BTreeSet::clone(&desired.interfaces));
        datapath.set_avoided(&self.avoided);
        let result = datapath.apply(&desired.published.state);
        // For a datapath that is opened anew.
        self.options.forwarded_families = datapath.forwarded_families();
        self.is_current = result.is_ok();
        match result {
            Err(error @ nft::Error::Incapable(_)) if self.options.is_beside_sockets => {
                self.datapath = Err(unavailable(&error));
                self.apply(desired)
            }
            result => result,
        }
    }

    /// Restores the tables, refuses removed UDP endpoints, and deletes stale flows once their next packet finds the new state.
    fn repair(&mut self) -> Result<(), nft::Error> {
        let Ok(datapath) = &mut self.datapath else { return Ok(()) };
        datapath.repair()?;
        let removed = datapath.removed_udp();
        // To look through the sockets takes tens of milliseconds on a large node.
        if !removed.is_subset(&self.known_removed_udp) {
            refuse_removed_udp(datapath, self.connected.as_ref())?;
        }
        self.known_removed_udp = removed;
        if self.is_current {
            self.flows = datapath.finish_generation().map(|is_second_pass_due| {
                if is_second_pass_due {
                    self.second_pass_at = Some(Instant::now() + SECOND_PASS_DELAY);
                }
            });
        }
        Ok(())
    }

    /// Tells whether the stale flows were deleted.
    fn finish(&mut self) -> Result<(), nft::Error> {
        mem::replace(&mut self.flows, Ok(()))
    }

    fn next_maintenance(&self) -> Instant {
        let recover_at = self.datapath.is_err().then_some(self.recover_at);
        [recover_at, self.second_pass_at].into_iter().flatten().fold(self.upkeep_at, Instant::min)
    }

    fn maintain(&mut self) -> (Option<Upkeep>, Next) {
        let begin = Instant::now();
        if self.datapath.is_err() && self.recover_at <= begin {
            return (None, self.recover());
        }
        if self.second_pass_at.take_if(|it| *it <= begin).is_some() {
            self.second_pass();
        }
        if self.upkeep_at > begin {
            return (None, Next::Wait);
        }
        let (upkeep, next) = self.upkeep();
        let now = Instant::now();
        self.upkeep_at = now + UPKEEP_INTERVAL.max((now - begin) * UPKEEP_SHARE);
        (Some(upkeep), next)
    }

    fn serve(&mut self, avoided: AvoidedEndpoints) -> Next {
        if self.avoided == avoided {
            return Next::Wait;
        }
        self.avoided = avoided;
        Next::Apply
    }

    async fn changed_externally(&mut self) {
        match &self.datapath {
            Ok(datapath) => datapath.changed_externally().await,
            Err(_) => pending().await,
        }
    }

    /// Restores at once what existing connections need; the repair that follows reports what fails.
    fn on_changed_externally(&mut self) -> bool {
        if let Ok(Err(error)) = self.datapath.as_mut().map(nft::Datapath::restore_base_chains) {
            tracing::debug!(error = error_chain(&error), "restoring the base chains failed");
        }
        true
    }

    fn condition(&self) -> PacketCondition {
        PacketCondition {
            unavailable: self.unavailable().cloned(),
            tables: self.datapath.as_ref().map(nft::Datapath::tables).unwrap_or_default(),
            second_chance: self.datapath.as_ref().map(nft::Datapath::second_chance).unwrap_or_default(),
        }
    }
}

/// Refuses flows to removed UDP endpoints as long as sockets are connected to them: the sockets of pods whose network namespace
/// cannot be entered are not terminated.
fn refuse_removed_udp(
    datapath: &mut nft::Datapath,
    connected: Option<&ConnectedBackends>,
) -> Result<(), nft::Error> {
    let removed = datapath.removed_udp();
    let in_use = match connected {
        Some(connected) if !removed.is_empty() => connected.among(&removed).unwrap_or_else(|error| {
            tracing::warn!(error = error_chain(&error), "removed UDP endpoints are not refused");
            BTreeSet::new()
        }),
        _ => BTreeSet::new(),
    };
    datapath.refuse_removed_udp(&in_use)
}

/// The report about a packet path beside the socket path that cannot be opened.
fn unavailable(error: &nft::Error) -> Rejected {
    not_served(format!(
        "{}; the socket path serves without it; retried until the cause is fixed",
        error_chain(error)
    ))
}

/// The report about a packet path beside the socket path.
pub(crate) fn not_served(reason: String) -> Rejected {
    Rejected::not_served(PACKET_PATH, reason)
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
            let options = nft::Options { is_beside_sockets: true, ..nft::Options::default() };
            let mut packets = Packets::start(&options, None).unwrap();
            let reason = Rejected::not_served("packets", "it failed before");
            packets.datapath = Err(reason.clone());
            let desired = Desired::of_turn(1);
            // The socket path serves without it.
            let report = packets.apply(&desired).unwrap();
            packets.repair().unwrap();
            assert_eq!(report.rejected, std::slice::from_ref(&reason));
            let PacketCondition { unavailable, tables, .. } = packets.condition();
            assert_eq!((unavailable, tables), (Some(reason), Vec::new()));
            assert_eq!(packets.recover(), Next::Apply);
            let report = packets.apply(&desired).unwrap();
            packets.repair().unwrap();
            assert_eq!(report.rejected, []);
            let PacketCondition { unavailable, tables, .. } = packets.condition();
            assert_eq!(unavailable, None);
            assert!(tables.len() == 2 && tables.iter().all(|(_, is_there)| *is_there));
        });
        test.join().unwrap();
    }
}
