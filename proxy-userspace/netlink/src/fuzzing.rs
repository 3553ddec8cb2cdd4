//! What the fuzz targets call: every reader of this crate, with arbitrary bytes.

use netlink_packet_core::Parseable as _;
use netlink_packet_sock_diag::inet::InetResponse;

use crate::{
    attribute::{Attribute, each, find, text},
    conntrack::{delete_request, flow},
    netfilter::NFGENMSG,
    nf_tables::{Chain, Rule},
    sock_diag::{ConnectedSocket, Transport},
    socket::{error_code, messages},
    uapi::CTA_TUPLE_ORIG,
};

/// A datagram from the kernel: it is read to its end, and what is found can be sent back as it came.
pub fn datagram(bytes: &[u8]) {
    let mut length = 0;
    for (header, payload) in messages(bytes) {
        length += payload.len();
        let _ = error_code(payload);
        if let Ok(it) = InetResponse::parse(payload) {
            let socket = ConnectedSocket::new(header.message_type as u8, Transport::Tcp, it);
            let _ = (socket.cookie(), socket.peer());
        }
        attributes(payload.get(NFGENMSG..).unwrap_or_default());
    }
    assert!(length <= bytes.len(), "no byte belongs to two messages");
    attributes(bytes);
}

fn attributes(bytes: &[u8]) {
    let all: Vec<_> = each(bytes).collect();
    let sent = all.iter().map(|(kind, value)| Attribute::bytes(*kind, *value));
    let emitted = Attribute::nested(0, sent).value;
    assert!(each(&emitted).eq(all.iter().copied()), "attributes are read as they were written");
    for (_, value) in &all {
        assert!(text(value).chars().count() <= value.len());
    }
    let _ = (Chain::parse(2, bytes).map(|it| it.drops_forwarded()), Rule::parse(10, bytes));
    if let Some(flow) = flow(bytes) {
        let request = delete_request(bytes, flow).expect("a flow has a tuple");
        let emitted = Attribute::nested(0, request.attributes).value;
        assert_eq!(
            find(&emitted, CTA_TUPLE_ORIG),
            find(bytes, CTA_TUPLE_ORIG),
            "an entry is deleted by the tuple under which it was listed"
        );
    }
}
