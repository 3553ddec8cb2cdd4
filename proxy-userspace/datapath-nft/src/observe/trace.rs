//! What becomes of the first packet of each connection to some destinations, as the kernel reports it (`nft monitor trace`).
//!
//! Invariant: the rules that ask for reports end with this value. They are in a table of their own, which the kernel deletes with
//! the socket that made it (`NFT_TABLE_F_OWNER`, Linux 5.12); before that the next start deletes what a process that was killed
//! has left.

use std::{
    collections::{HashMap, VecDeque},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use datapath::{FrontendAddress, unspecified};
use model::{Family, Protocol, state::ServiceState};
use netlink::{Attribute, Message, Netfilter, Notifications, find, text, u32, uapi::*};
use nix::{errno::Errno, net::if_::if_indextoname};

use crate::{
    apply::transaction::commit,
    encode::{
        chain::Hook,
        expressions::{Rule, Verdict},
        tables::{TABLE, delete_table, in_table, new_chain, new_rule, new_table},
    },
    error::{Error, MAX_DESTINATIONS},
    plan::{
        compile::{Frontend, compile},
        forwarding::WITH_SECOND,
        rules::REFUSE_CHAIN,
    },
};

/// The name of the tables that ask for reports.
const TRACE_TABLE: &str = "kube-proxy-ebpf-trace";
const TRACE_MESSAGE: u16 = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_TRACE;
/// How long after its last report a packet counts as gone.
const REPORT_TIMEOUT: Duration = Duration::from_millis(200);
/// How many packets are followed at once.
const MAX_FOLLOWED: usize = 4096;
/// How many reports of a packet are kept.
const MAX_STEPS: usize = 64;
/// The verdict of a rule, or the policy of a chain, that drops a packet, in words.
const DROP: &str = "drop";

/// The chains of the table: those in which packets are chosen, and those in which they are seen last.
const CHAINS: [(&str, Hook); 4] = [
    ("prerouting", Hook::PREROUTING_EACH),
    ("output", Hook::OUTPUT_EACH),
    ("input", Hook::INPUT_LAST),
    ("postrouting", Hook::POSTROUTING_LAST),
];

/// A destination to which packets are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TracedDestination {
    /// The address; an unspecified one stands for every address of the node, as with node ports.
    pub address: IpAddr,
    /// The port; `None` stands for all.
    pub port: Option<u16>,
    /// The protocol; `None` stands for all.
    pub protocol: Option<Protocol>,
}

impl From<FrontendAddress> for TracedDestination {
    fn from(it: FrontendAddress) -> Self {
        Self { address: it.address.ip(), port: Some(it.address.port()), protocol: Some(it.protocol) }
    }
}

/// The addresses of a Service, each with the position of its port; those of node ports are unspecified.
pub fn frontends(state: &ServiceState) -> Vec<(FrontendAddress, usize)> {
    let ports = compile(state, &[], &Default::default()).ports;
    let of_port = |index, it: Vec<Frontend>| it.into_iter().map(move |it| (it.address, index));
    ports.into_iter().flat_map(|it| of_port(it.index, it.frontends)).collect()
}

/// The first packet of a connection, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedPacket {
    /// The interface at which it arrived; `None` for one of this node.
    pub interface: Option<String>,
    pub protocol: u8,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// What replaced the source.
    pub masqueraded: Option<SocketAddr>,
    /// What replaced the destination.
    pub endpoint: Option<SocketAddr>,
    pub verdict: PacketVerdict,
    /// The rules that it met: table, chain, and verdict.
    pub steps: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PacketVerdict {
    /// It passed all rules.
    Passed,
    /// This proxy refused it: the Service has no endpoints.
    Refused,
    /// A rule of nftables dropped or rejected it, of this proxy or of others.
    Dropped { table: String, chain: String },
    /// It was not seen to leave: routing, connection tracking or something besides nftables dropped it.
    Vanished,
}

impl PacketVerdict {
    /// Why this proxy has dropped it.
    pub fn drop_reason(&self) -> Option<&'static str> {
        match self {
            Self::Dropped { table, chain } if table == TABLE => match chain.as_str() {
                "select" | "node-select" => {
                    Some("the Service has no endpoint that its traffic policy allows here")
                }
                "source-ranges" | "source-ranges-local" | "source-ranges-forwarded" => {
                    Some("the source is not in loadBalancerSourceRanges")
                }
                "unassigned-forward" | "unassigned-output" => Some("no Service has this cluster IP"),
                _ => None,
            },
            _ => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PacketTraceItem {
    Packet(Box<TracedPacket>),
    /// Reports were lost, because they were not read in time.
    Lost,
}

/// Follows packets until it is dropped.
#[derive(Debug)]
pub struct PacketTrace {
    /// The owner of the tables.
    netfilter: Netfilter,
    /// What the tables ask for.
    destinations: Vec<TracedDestination>,
    notifications: Notifications,
    followed: HashMap<u32, Followed>,
    /// Packets that are through.
    done: VecDeque<PacketTraceItem>,
}

#[derive(Debug)]
struct Followed {
    packet: TracedPacket,
    last: Instant,
}

impl PacketTrace {
    /// Follows packets to these destinations in the calling thread's network namespace.
    ///
    /// # Errors
    ///
    /// If there are too many destinations, or the kernel refuses.
    pub fn start(destinations: &[TracedDestination]) -> Result<Self, Error> {
        let notifications = Notifications::subscribe(NFNLGRP_NFTRACE);
        let mut trace = Self {
            netfilter: Netfilter::open().map_err(Error::Open)?,
            destinations: Vec::new(),
            notifications: notifications.map_err(Error::Open)?,
            followed: HashMap::new(),
            done: VecDeque::new(),
        };
        trace.set_destinations(destinations)?;
        Ok(trace)
    }

    /// Follows packets to these destinations from now on.
    ///
    /// # Errors
    ///
    /// If there are too many, or the kernel refuses; those before stay.
    pub fn set_destinations(&mut self, destinations: &[TracedDestination]) -> Result<(), Error> {
        if destinations.len() > MAX_DESTINATIONS {
            return Err(Error::TooManyTracedDestinations(destinations.len()));
        }
        if destinations == self.destinations {
            return Ok(());
        }
        match commit(&mut self.netfilter, replace(destinations, true)) {
            // The kernel has no owned tables.
            Err(Error::Refused { errno: Errno::EOPNOTSUPP | Errno::EINVAL, .. }) => {
                commit(&mut self.netfilter, replace(destinations, false))?;
            }
            result => result?,
        }
        self.destinations = destinations.to_vec();
        Ok(())
    }

    /// What there is; more may follow the end.
    pub fn poll(&mut self) -> Result<Option<PacketTraceItem>, Error> {
        while self.done.is_empty() {
            let (mut reports, now) = (Vec::new(), Instant::now());
            let received = self.notifications.receive(|header, attributes| {
                if header.message_type == TRACE_MESSAGE {
                    reports.extend(Report::parse(attributes));
                }
            });
            match received {
                Ok(()) => reports.into_iter().for_each(|it| self.on_report(it, now)),
                Err(Errno::EAGAIN) => {
                    self.give_up(now);
                    break;
                }
                Err(Errno::EINTR) => {}
                Err(Errno::ENOBUFS) => self.done.push_back(PacketTraceItem::Lost),
                Err(errno) => return Err(Error::Trace(errno)),
            }
        }
        Ok(self.done.pop_front())
    }

    fn on_report(&mut self, report: Report, now: Instant) {
        let Report { id, table, chain, verdict, header, interface } = report;
        let is_own = table == TRACE_TABLE;
        let is_chosen = is_own && CHAINS[..2].iter().any(|(name, _)| *name == chain);
        if is_chosen {
            let Some(header) = header else { return };
            if self.followed.len() >= MAX_FOLLOWED && !self.followed.contains_key(&id) {
                self.done.push_back(PacketTraceItem::Lost);
                return;
            }
            // The chain's policy is reported, too.
            let is_same = |it: &Followed| {
                (it.packet.source, it.packet.destination) == (header.source, header.destination)
            };
            if !self.followed.get(&id).is_some_and(is_same) {
                let packet = TracedPacket {
                    interface: interface.and_then(interface_name),
                    protocol: header.protocol,
                    source: header.source,
                    destination: header.destination,
                    masqueraded: None,
                    endpoint: None,
                    verdict: PacketVerdict::Vanished,
                    steps: Vec::new(),
                };
                self.followed.insert(id, Followed { packet, last: now });
            }
            return;
        }
        let Some(Followed { packet, last }) = self.followed.get_mut(&id) else { return };
        *last = now;
        if let Some(header) = header {
            packet.endpoint = Some(header.destination).filter(|it| *it != packet.destination);
            packet.masqueraded = Some(header.source).filter(|it| *it != packet.source);
        }
        let end = if is_own {
            Some(PacketVerdict::Passed)
        } else {
            if packet.steps.len() < MAX_STEPS {
                packet.steps.push(format!("{table} {chain}: {verdict}"));
            }
            match &*verdict {
                DROP if table == TABLE && chain == REFUSE_CHAIN => Some(PacketVerdict::Refused),
                DROP => Some(PacketVerdict::Dropped { table, chain }),
                _ => None,
            }
        };
        if let Some(end) = end {
            self.end(id, end);
        }
    }

    fn end(&mut self, id: u32, verdict: PacketVerdict) {
        if let Some(Followed { packet, .. }) = self.followed.remove(&id) {
            self.done.push_back(PacketTraceItem::Packet(Box::new(TracedPacket { verdict, ..packet })));
        }
    }

    /// Reports packets of which nothing was heard any more.
    fn give_up(&mut self, now: Instant) {
        let is_gone = |it: &Followed| now.duration_since(it.last) >= REPORT_TIMEOUT;
        let gone: Vec<_> = self.followed.iter().filter(|(_, it)| is_gone(it)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|it| self.end(it, PacketVerdict::Vanished));
    }
}

impl Drop for PacketTrace {
    fn drop(&mut self) {
        remove(&mut self.netfilter);
    }
}

/// Deletes what a process that was killed has left, except the tables of one that lives.
pub(crate) fn remove(netfilter: &mut Netfilter) {
    for family in Family::ALL {
        let _ = commit(netfilter, deletion(family));
    }
}

/// Deletes a table that may not exist.
fn deletion(family: Family) -> [Message; 2] {
    [new_table(family, ""), delete_table(family)].map(|it| in_table(TRACE_TABLE, it))
}

/// The messages that replace the tables.
fn replace(destinations: &[TracedDestination], is_owned: bool) -> Vec<Message> {
    let of = |family: Family| {
        let mut table = new_table(family, "a trace runs");
        if is_owned {
            table.attributes.push(Attribute::u32(NFTA_TABLE_FLAGS, NFT_TABLE_F_OWNER));
        }
        let chains = CHAINS.map(|(name, hook)| new_chain(family, name, Some(hook)));
        // A copy of it goes to the second node, and would be traced, too.
        let no_first = Rule::new(family, "goes to its second unless it is known").if_priority_in(WITH_SECOND);
        let no_first = new_rule(family, CHAINS[0].0, &no_first.verdict(&Verdict::Return));
        let own = destinations.iter().filter(move |it| Family::of(it.address) == family);
        let rules = own.flat_map(move |it| {
            let rule = it.rule(family);
            CHAINS[..2].iter().map(move |(name, _)| new_rule(family, name, &rule))
        });
        let made = [table]
            .into_iter()
            .chain(chains)
            .chain([no_first])
            .chain(rules)
            .map(|it| in_table(TRACE_TABLE, it));
        deletion(family).into_iter().chain(made).collect::<Vec<_>>()
    };
    // The tables are deleted by their owner, or do not exist.
    Family::ALL.into_iter().flat_map(of).collect()
}

impl TracedDestination {
    fn rule(&self, family: Family) -> Rule {
        let rule = Rule::new(family, "first packets").if_new();
        let rule = match self.protocol {
            Some(protocol) => rule.if_protocol(protocol.number()),
            None => rule,
        };
        let rule = match self.address {
            it if it == unspecified(family) => rule.if_to_local_address(),
            it => rule.if_to(it.into()),
        };
        match self.port {
            Some(port) => rule.if_destination_port(port).trace(),
            None => rule.trace(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Report {
    /// The number of the packet, which others get again later.
    id: u32,
    table: String,
    chain: String,
    /// In words.
    verdict: String,
    /// Its addresses, in the first report of each base chain.
    header: Option<Header>,
    /// The index of the interface at which it arrived.
    interface: Option<u32>,
}

/// Where a packet comes from and goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    protocol: u8,
    source: SocketAddr,
    destination: SocketAddr,
}

impl Report {
    /// Reads the attributes `NFTA_TRACE_…` of a message.
    fn parse(attributes: &[u8]) -> Option<Self> {
        let of = |kind| find(attributes, kind);
        let transport = of(NFTA_TRACE_TRANSPORT_HEADER).unwrap_or_default();
        Some(Self {
            id: u32(of(NFTA_TRACE_ID)?)?,
            table: text(of(NFTA_TRACE_TABLE)?),
            chain: text(of(NFTA_TRACE_CHAIN)?),
            // The policy of a base chain decides where no rule has.
            verdict: in_words(of(NFTA_TRACE_VERDICT).or_else(|| of(NFTA_TRACE_POLICY))),
            header: of(NFTA_TRACE_NETWORK_HEADER).and_then(|it| Header::parse(it, transport)),
            interface: of(NFTA_TRACE_IIF).and_then(u32),
        })
    }
}

/// A verdict or a policy in words.
fn in_words(value: Option<&[u8]>) -> String {
    let value = value.unwrap_or_default();
    // A policy is a number, a verdict has attributes.
    let code = match value.len() {
        4 => u32(value),
        _ => find(value, NFTA_VERDICT_CODE).and_then(u32),
    };
    let chain = find(value, NFTA_VERDICT_CHAIN).map(text);
    match (code.map(u32::cast_signed), chain) {
        (Some(NF_DROP), _) => DROP.to_owned(),
        (Some(NF_ACCEPT), _) => "accept".to_owned(),
        (Some(NFT_CONTINUE) | None, _) => "continue".to_owned(),
        (Some(NFT_RETURN), _) => "return".to_owned(),
        (Some(NFT_JUMP | NFT_GOTO), Some(chain)) => format!("to {chain}"),
        (Some(code), _) => format!("verdict {code}"),
    }
}

impl Header {
    /// From the beginnings of the network header and of the transport header.
    fn parse(network: &[u8], transport: &[u8]) -> Option<Self> {
        let v4 = |at| Some(IpAddr::from(*network.get(at..)?.first_chunk::<4>()?));
        let v6 = |at| Some(IpAddr::from(*network.get(at..)?.first_chunk::<16>()?));
        let port =
            |at| transport.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |it| u16::from_be_bytes(*it));
        let (protocol, source, destination) = match network.first()? >> 4 {
            4 => (*network.get(9)?, v4(12)?, v4(16)?),
            6 => (*network.get(6)?, v6(8)?, v6(24)?),
            _ => return None,
        };
        let source = SocketAddr::new(source, port(0));
        Some(Self { protocol, source, destination: SocketAddr::new(destination, port(2)) })
    }
}

fn interface_name(index: u32) -> Option<String> {
    if_indextoname(index).ok().map(|it| it.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests;
