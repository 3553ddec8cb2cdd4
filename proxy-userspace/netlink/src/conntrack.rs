//! The conntrack table, over netlink.
//!
//! Invariant: an entry is deleted by exactly the tuple under which the kernel listed it.
//! The numbers are those of linux/netfilter/nfnetlink_conntrack.h.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use netlink_packet_core::NLA_F_NESTED;
use nix::errno::Errno;

use crate::{
    attribute::{Attribute, find},
    netfilter::{Message, Netfilter},
};

/// `NFNL_SUBSYS_CTNETLINK`, with `IPCTNL_MSG_CT_GET` and `…_DELETE`.
const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;

/// `NFPROTO_IPV4` and `NFPROTO_IPV6`.
const V4: u8 = 2;
const V6: u8 = 10;

pub(crate) const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const ZONE: u16 = 18;
const FILTER: u16 = 25;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
const PROTO_NUMBER: u16 = 1;
const SOURCE_PORT: u16 = 2;
const DESTINATION_PORT: u16 = 3;
/// `CTA_FILTER_ORIG_FLAGS`, and the flag for the protocol.
const FILTER_ORIGINAL: u16 = 1;
const FILTER_PROTOCOL: u32 = 1 << 3;

/// A conntrack entry, reduced to what is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    /// The number of its protocol.
    pub(crate) protocol: u8,
    /// The destination of its original direction: where the client sends to.
    pub(crate) destination: SocketAddr,
    /// The source of its reply direction.
    pub(crate) reply_source: SocketAddr,
}

/// Deletes the entries of a family and of some protocols that are stale; returns how many.
pub(crate) fn delete_stale(
    is_ipv6: bool,
    protocols: &BTreeSet<u8>,
    mut is_stale: impl FnMut(&Flow) -> bool,
) -> Result<usize, Errno> {
    let mut netfilter =
        Netfilter::open().map_err(|it| Errno::from_raw(it.raw_os_error().unwrap_or_default()))?;
    let mut stale = Vec::new();
    let family = if is_ipv6 { V6 } else { V4 };
    for &protocol in protocols {
        match netfilter.dump(&list_request(protocol, family), |attributes| {
            if let Some(flow) = flow(attributes)
                && flow.protocol == protocol
                && is_stale(&flow)
            {
                stale.extend(delete_request(attributes, flow));
            }
        }) {
            // The table changed while it was listed; the entries that were listed are valid.
            Ok(()) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
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

/// Requests the entries of a protocol and a family; a kernel before 5.9 ignores the filter and lists all.
fn list_request(protocol: u8, family: u8) -> Message {
    let tuple = [Attribute::nested(TUPLE_PROTO, [Attribute::u8(PROTO_NUMBER, protocol)])];
    let filter = [Attribute::bytes(FILTER_ORIGINAL, FILTER_PROTOCOL.to_ne_bytes())];
    let attributes = vec![Attribute::nested(TUPLE_ORIGINAL, tuple), Attribute::nested(FILTER, filter)];
    Message { kind: GET, flags: 0, family, attributes }
}

pub(crate) fn delete_request(attributes: &[u8], flow: Flow) -> Option<Message> {
    let mut copied = vec![Attribute::bytes(TUPLE_ORIGINAL | NLA_F_NESTED, find(attributes, TUPLE_ORIGINAL)?)];
    copied.extend(find(attributes, ZONE).map(|it| Attribute::bytes(ZONE, it)));
    let family = if flow.destination.is_ipv4() { V4 } else { V6 };
    Some(Message { kind: DELETE, flags: 0, family, attributes: copied })
}

pub(crate) fn flow(attributes: &[u8]) -> Option<Flow> {
    let original = find(attributes, TUPLE_ORIGINAL)?;
    let protocol = *find(find(original, TUPLE_PROTO)?, PROTO_NUMBER)?.first()?;
    let destination = end_of(original, [2, 4], DESTINATION_PORT)?;
    let reply_source = end_of(find(attributes, TUPLE_REPLY)?, [1, 3], SOURCE_PORT)?;
    Some(Flow { protocol, destination, reply_source })
}

/// One end of a tuple: its address, whose attribute type depends on the family, and its port.
fn end_of(tuple: &[u8], [v4, v6]: [u16; 2], port: u16) -> Option<SocketAddr> {
    let ip = find(tuple, TUPLE_IP)?;
    let address = match (find(ip, v4), find(ip, v6)) {
        (Some(it), _) => IpAddr::from(<[u8; 4]>::try_from(it).ok()?),
        (None, Some(it)) => IpAddr::from(<[u8; 16]>::try_from(it).ok()?),
        (None, None) => return None,
    };
    let port = u16::from_be_bytes(find(find(tuple, TUPLE_PROTO)?, port)?.try_into().ok()?);
    Some(SocketAddr::new(address, port))
}
