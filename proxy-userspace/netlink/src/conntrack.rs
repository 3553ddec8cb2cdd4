//! The conntrack table, over netlink.
//!
//! Invariant: an entry is deleted by exactly the tuple under which the kernel listed it.
//! The numbers are those of linux/netfilter/nfnetlink_conntrack.h.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use nix::errno::Errno;

use crate::{
    attribute::{Attribute, find},
    netfilter::{Message, Netfilter},
    uapi::*,
};

const GET: u16 = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET;
const DELETE: u16 = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE;

/// A conntrack entry, reduced to what is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) protocol: u8,
    /// The destination of its original direction: where the client sends to.
    pub(crate) destination: SocketAddr,
    /// The source of its reply direction.
    pub(crate) reply_source: SocketAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpConnection {
    /// Where the client connects to.
    pub destination: SocketAddr,
    pub client: SocketAddr,
    pub stage: TcpStage,
}

/// How far a TCP connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpStage {
    /// The destination has not answered.
    Opening,
    /// It is in use, or one side has closed it.
    Open,
    /// Both sides have closed it, or one has reset it; the kernel tracks it for a while.
    Closed,
}

/// Passes each TCP connection that the kernel tracks to `each`.
pub fn tcp_connections(mut each: impl FnMut(TcpConnection)) -> Result<(), Errno> {
    let mut netfilter = open()?;
    for family in [NFPROTO_IPV4, NFPROTO_IPV6] {
        list(&mut netfilter, IPPROTO_TCP, family, |attributes, flow| {
            if let Some(it) = tcp_connection(attributes, flow.destination) {
                each(it);
            }
        })?;
    }
    Ok(())
}

fn tcp_connection(attributes: &[u8], destination: SocketAddr) -> Option<TcpConnection> {
    let original = find(attributes, CTA_TUPLE_ORIG)?;
    let client = end_of(original, [CTA_IP_V4_SRC, CTA_IP_V6_SRC], CTA_PROTO_SRC_PORT)?;
    let tcp = find(attributes, CTA_PROTOINFO).and_then(|it| find(it, CTA_PROTOINFO_TCP));
    let state = tcp.and_then(|it| find(it, CTA_PROTOINFO_TCP_STATE)?.first().copied());
    let stage = match state {
        Some(TCP_CONNTRACK_SYN_SENT) => TcpStage::Opening,
        Some(TCP_CONNTRACK_TIME_WAIT | TCP_CONNTRACK_CLOSE) => TcpStage::Closed,
        // The kernel does not tell the state of a connection in a flowtable, or in hardware.
        Some(_) | None => TcpStage::Open,
    };
    Some(TcpConnection { destination, client, stage })
}

/// Deletes the entries of a family and of some protocols that are stale; returns how many.
pub(crate) fn delete_stale(
    is_ipv6: bool,
    protocols: &BTreeSet<u8>,
    mut is_stale: impl FnMut(&Flow) -> bool,
) -> Result<usize, Errno> {
    let mut netfilter = open()?;
    let mut stale = Vec::new();
    let family = if is_ipv6 { NFPROTO_IPV6 } else { NFPROTO_IPV4 };
    for &protocol in protocols {
        list(&mut netfilter, protocol, family, |attributes, flow| {
            if is_stale(&flow) {
                stale.extend(delete_request(attributes, flow));
            }
        })?;
    }
    let mut deleted = 0;
    for some in stale.chunks(1000) {
        let refused = netfilter.each(some)?;
        deleted += some.len() - refused.len();
        // An entry that is gone has expired meanwhile.
        if let Some(it) = refused.iter().find(|it| it.errno != Errno::ENOENT) {
            return Err(it.errno);
        }
    }
    Ok(deleted)
}

fn open() -> Result<Netfilter, Errno> {
    Netfilter::open().map_err(|it| Errno::from_raw(it.raw_os_error().unwrap_or_default()))
}

fn list(
    netfilter: &mut Netfilter,
    protocol: u8,
    family: u8,
    mut each: impl FnMut(&[u8], Flow),
) -> Result<(), Errno> {
    let result = netfilter.dump(&list_request(protocol, family), |attributes| {
        if let Some(flow) = flow(attributes)
            && flow.protocol == protocol
        {
            each(attributes, flow);
        }
    });
    // The table changed while it was listed; the entries that were listed are valid.
    result.or_else(|it| if it == Errno::EINTR { Ok(()) } else { Err(it) })
}

/// Requests the entries of a protocol and a family; a kernel before 5.9 ignores the filter and lists all.
fn list_request(protocol: u8, family: u8) -> Message {
    let tuple = [Attribute::nested(CTA_TUPLE_PROTO, [Attribute::u8(CTA_PROTO_NUM, protocol)])];
    let filter = [Attribute::bytes(CTA_FILTER_ORIG_FLAGS, CTA_FILTER_F_CTA_PROTO_NUM.to_ne_bytes())];
    let attributes = vec![Attribute::nested(CTA_TUPLE_ORIG, tuple), Attribute::nested(CTA_FILTER, filter)];
    Message { kind: GET, flags: 0, family, attributes }
}

pub(crate) fn delete_request(attributes: &[u8], flow: Flow) -> Option<Message> {
    let mut copied = vec![Attribute::encoded(CTA_TUPLE_ORIG, find(attributes, CTA_TUPLE_ORIG)?.into())];
    copied.extend(find(attributes, CTA_ZONE).map(|it| Attribute::bytes(CTA_ZONE, it)));
    let family = if flow.destination.is_ipv4() { NFPROTO_IPV4 } else { NFPROTO_IPV6 };
    Some(Message { kind: DELETE, flags: 0, family, attributes: copied })
}

pub(crate) fn flow(attributes: &[u8]) -> Option<Flow> {
    let original = find(attributes, CTA_TUPLE_ORIG)?;
    let protocol = *find(find(original, CTA_TUPLE_PROTO)?, CTA_PROTO_NUM)?.first()?;
    let destination = end_of(original, [CTA_IP_V4_DST, CTA_IP_V6_DST], CTA_PROTO_DST_PORT)?;
    let reply_source =
        end_of(find(attributes, CTA_TUPLE_REPLY)?, [CTA_IP_V4_SRC, CTA_IP_V6_SRC], CTA_PROTO_SRC_PORT)?;
    Some(Flow { protocol, destination, reply_source })
}

/// One end of a tuple: its address, whose attribute type depends on the family, and its port.
fn end_of(tuple: &[u8], [v4, v6]: [u16; 2], port: u16) -> Option<SocketAddr> {
    let ip = find(tuple, CTA_TUPLE_IP)?;
    let address = match (find(ip, v4), find(ip, v6)) {
        (Some(it), _) => IpAddr::from(<[u8; 4]>::try_from(it).ok()?),
        (None, Some(it)) => IpAddr::from(<[u8; 16]>::try_from(it).ok()?),
        (None, None) => return None,
    };
    let port = u16::from_be_bytes(find(find(tuple, CTA_TUPLE_PROTO)?, port)?.try_into().ok()?);
    Some(SocketAddr::new(address, port))
}
