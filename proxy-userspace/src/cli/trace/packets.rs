//! The packets of a trace: those that nftables translates, by the kernel's own reports, and those that go on to other nodes.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use admin::Admin;
use anyhow::Result;
use datapath::{FrontendAddress, unspecified};
use datapath_ebpf::{self as ebpf, SentPacket, SentPackets};
use datapath_nft::{PacketTrace, PacketTraceItem, PacketVerdict, TracedDestination, TracedPacket, frontends};
use jiff::Timestamp;
use model::{Family, Protocol, ServiceName, error_chain, state::NodeState};
use netlink::uapi::IPPROTO_UDP;
use publish::Published;

use super::{
    filters::Filters,
    line::Line,
    names::{port_label, protocol},
    packet::{ForwardedTo, Packet, PacketResult},
};

/// How often the addresses of Services are read again at most.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// How many packets that are sent on are read at once.
const MAX_POLLED: usize = 1024;
/// How many flows of UDP are remembered.
const MAX_FLOWS: usize = 4096;

/// Packets to a Service or to an address.
pub(super) struct Packets {
    admin: Admin,
    wanted: Wanted,
    failed_only: bool,
    has_steps: bool,
    /// The ports at addresses that are wanted; those of node ports have the unspecified address.
    names: HashMap<FrontendAddress, (ServiceName, String)>,
    /// The state that they are of.
    state: Option<Arc<Published>>,
    read_at: Instant,
    trace: PacketTrace,
    sent: Option<Sent>,
    /// What is said once.
    notice: Option<Line>,
}

/// Packets from outside that this node sends on to other nodes.
struct Sent {
    options: ebpf::Options,
    /// None while nothing is forwarded.
    packets: Option<SentPackets>,
    /// The flows of UDP of which a datagram was seen; none if each datagram is wanted.
    flows: Option<HashSet<(SocketAddr, SocketAddr)>>,
    /// How many were reported as lost.
    lost: u64,
}

impl Sent {
    /// Begins to follow packets to these addresses once some are forwarded, and follows them to other interfaces.
    fn refresh(&mut self, wanted: impl Iterator<Item = FrontendAddress>) -> Result<(), ebpf::Error> {
        match &mut self.packets {
            Some(packets) => packets.follow_uplinks()?,
            None => self.packets = SentPackets::start(&self.options)?,
        }
        self.packets.as_mut().map_or(Ok(()), |it| it.set_frontends(wanted))
    }

    /// The next packet, of UDP the first of a flow; more may follow the end.
    fn next(&mut self) -> Option<SentPacket> {
        let Self { packets: Some(packets), flows, .. } = self else { return None };
        let is_first = |it: &SentPacket| match flows {
            Some(flows) if it.protocol == IPPROTO_UDP => {
                if flows.len() >= MAX_FLOWS {
                    flows.clear();
                }
                flows.insert((it.source, it.destination))
            }
            _ => true,
        };
        std::iter::from_fn(|| packets.poll()).take(MAX_POLLED).find(is_first)
    }

    fn has_lost(&mut self) -> Result<bool, ebpf::Error> {
        let Some(packets) = &self.packets else { return Ok(false) };
        let lost = packets.lost()?;
        Ok(lost > std::mem::replace(&mut self.lost, lost))
    }
}

enum Wanted {
    Service(ServiceName),
    /// Port 0 stands for all.
    Address(SocketAddr),
}

impl Wanted {
    fn destinations(
        &self,
        names: &HashMap<FrontendAddress, (ServiceName, String)>,
    ) -> Vec<TracedDestination> {
        match self {
            Self::Address(it) => {
                let port = Some(it.port()).filter(|it| *it != 0);
                vec![TracedDestination { address: it.ip(), port, protocol: None }]
            }
            Self::Service(_) => {
                let mut destinations: Vec<_> = names.keys().copied().map(TracedDestination::from).collect();
                destinations.sort_unstable();
                destinations
            }
        }
    }

    /// The ports that may be meant.
    fn names(&self, state: &NodeState) -> HashMap<FrontendAddress, (ServiceName, String)> {
        let is_wanted = |name: &ServiceName| match self {
            Self::Service(it) => it == name,
            Self::Address(_) => true,
        };
        // A node port is at addresses that only the kernel knows.
        let is_at = |it: &FrontendAddress| match self {
            Self::Service(_) => true,
            Self::Address(at) => {
                let ip = it.address.ip();
                (ip == at.ip() || ip == unspecified(Family::of(at.ip())))
                    && (at.port() == 0 || at.port() == it.address.port())
            }
        };
        let services = state.services.iter().filter(|(name, _)| is_wanted(name));
        let named = services.flat_map(|(name, state)| {
            frontends(state).into_iter().filter(|(address, _)| is_at(address)).filter_map(
                move |(address, port)| {
                    Some((address, (name.clone(), port_label(state.service.ports.get(port)?))))
                },
            )
        });
        named.collect()
    }
}

impl Packets {
    /// Begins to follow packets; `None` if the filters need a process, or name no destination.
    pub(super) fn start(
        admin: &Admin,
        requested: &Filters,
        sockets: Option<&ebpf::Options>,
    ) -> Result<Option<Self>> {
        let Filters { service, to, pid, cgroup, pod, netns, .. } = requested;
        let is_of_process = pid.is_some() || cgroup.is_some() || pod.is_some() || netns.is_some();
        let wanted = match (service, to) {
            _ if is_of_process => return Ok(None),
            // Packets have an address, which says more than a name.
            (_, Some(to)) => Wanted::Address(*to),
            (Some(service), None) => Wanted::Service(service.clone()),
            (None, None) => return Ok(None),
        };
        let state = admin.served();
        let names = state.as_ref().map(|it| wanted.names(&it.state)).unwrap_or_default();
        let trace = PacketTrace::start(&wanted.destinations(&names))?;
        let (failed_only, has_steps) = (requested.failed, requested.verbosity > 0);
        let flows = (!requested.all).then(HashSet::new);
        let sent = sockets.map(|it| Sent { options: it.clone(), packets: None, flows, lost: 0 });
        let (admin, read_at) = (admin.clone(), Instant::now());
        let notice = None;
        let mut packets =
            Self { admin, wanted, failed_only, has_steps, names, state, read_at, trace, sent, notice };
        packets.refresh_sent();
        Ok(Some(packets))
    }

    /// Follows a Service to other addresses.
    pub(super) fn refresh(&mut self) -> Result<()> {
        if self.read_at.elapsed() < READ_INTERVAL {
            return Ok(());
        }
        self.read_at = Instant::now();
        let Some(served) = self.admin.served() else { return Ok(()) };
        if self.state.as_ref().is_none_or(|it| !Arc::ptr_eq(it, &served)) {
            self.names = self.wanted.names(&served.state);
            self.state = Some(served);
            self.trace.set_destinations(&self.wanted.destinations(&self.names))?;
        }
        self.refresh_sent();
        Ok(())
    }

    /// Follows packets that are sent on; if that fails, the trace goes on without them, and says so.
    fn refresh_sent(&mut self) {
        let Some(sent) = &mut self.sent else { return };
        if let Err(error) = sent.refresh(self.names.keys().copied()) {
            self.sent = None;
            self.notice = Some(Line::NoSentPackets { reason: error_chain(&error) });
        }
    }

    /// The next line; more may follow the end.
    pub(super) fn poll(&mut self) -> Result<Option<Line>> {
        if let Some(notice) = self.notice.take() {
            return Ok(Some(notice));
        }
        // Others may send faster than this reads.
        for _ in 0..MAX_POLLED {
            let Some(it) = self.sent.as_mut().and_then(Sent::next) else { break };
            let line = self.sent_line(&it);
            if line.is_some() {
                return Ok(line);
            }
        }
        if let Some(true) = self.sent.as_mut().map(Sent::has_lost).transpose()? {
            return Ok(Some(Line::PacketsLost));
        }
        loop {
            match self.trace.poll()? {
                None => return Ok(None),
                Some(PacketTraceItem::Lost) => return Ok(Some(Line::PacketsLost)),
                Some(PacketTraceItem::Packet(it))
                    if self.failed_only && it.verdict == PacketVerdict::Passed => {}
                Some(PacketTraceItem::Packet(it)) => return Ok(Some(Line::Packet(self.line(*it)))),
            }
        }
    }

    /// A packet that goes on to another node, if it is wanted.
    fn sent_line(&self, packet: &SentPacket) -> Option<Line> {
        let SentPacket { protocol: number, source, destination, node, row, rows, .. } = *packet;
        let (service, port) = self.name(number, destination)?;
        if self.failed_only && node.is_some() {
            return None;
        }
        let known = self.state.as_ref().map(|it| &it.state.nodes);
        let named = known.zip(node).and_then(|(known, address)| {
            known.iter().find(|(_, it)| it.addresses.contains(&address)).map(|(name, _)| name.to_string())
        });
        let forwarded_to = node.map(|address| ForwardedTo { node: named, address, row, rows });
        let has_left = forwarded_to.is_none().then(|| format!("the node of row {row} has left the cluster"));
        Some(Line::Packet(Packet {
            time: Timestamp::now(),
            interface: packet.interface(),
            protocol: protocol(number),
            source,
            destination,
            service: Some(service.to_string()),
            port: Some(port.clone()),
            verdict: if node.is_some() { PacketResult::Forwarded } else { PacketResult::Dropped },
            forwarded_to,
            endpoint: None,
            masqueraded: None,
            table: None,
            chain: None,
            reason: has_left,
            steps: Vec::new(),
        }))
    }

    fn line(&self, packet: TracedPacket) -> Packet {
        let name = self.name(packet.protocol, packet.destination);
        let reason = packet.verdict.drop_reason().map(ToOwned::to_owned);
        let (verdict, table, chain) = match packet.verdict {
            PacketVerdict::Passed if packet.endpoint.is_some() => (PacketResult::Redirected, None, None),
            PacketVerdict::Passed => (PacketResult::Passed, None, None),
            PacketVerdict::Refused if name.is_none() => (PacketResult::NoPort, None, None),
            PacketVerdict::Refused => (PacketResult::NoEndpoints, None, None),
            PacketVerdict::Dropped { table, chain } => (PacketResult::Dropped, Some(table), Some(chain)),
            PacketVerdict::Vanished => (PacketResult::Vanished, None, None),
        };
        Packet {
            time: Timestamp::now(),
            interface: packet.interface,
            protocol: protocol(packet.protocol),
            source: packet.source,
            destination: packet.destination,
            service: name.map(|(service, _)| service.to_string()),
            port: name.map(|(_, port)| port.clone()),
            verdict,
            forwarded_to: None,
            endpoint: packet.endpoint,
            masqueraded: packet.masqueraded,
            table,
            chain,
            reason,
            steps: if self.has_steps { packet.steps } else { Vec::new() },
        }
    }

    fn name(&self, protocol: u8, destination: SocketAddr) -> Option<&(ServiceName, String)> {
        let protocol = Protocol::of_number(protocol)?;
        let at = |address| self.names.get(&FrontendAddress { address, protocol });
        let any = unspecified(Family::of(destination.ip()));
        at(destination).or_else(|| at(SocketAddr::new(any, destination.port())))
    }
}
