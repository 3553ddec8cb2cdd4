//! Connections of programs in the host's network to pods, left out of connection tracking on request.
//!
//! Invariant: of a connection either both directions are tracked or neither is, and one that this table translates is.
//!
//! NAT chains make the kernel track every connection of the host, also those whose socket the socket path has connected to its
//! endpoint, and which no rule translates. To the packet of a connection that is translated here a Service is the destination, and
//! its reply belongs to no socket: so a packet of either direction shows whether it may be left out.

use ipnet::IpNet;
use model::Family;

use crate::encode::{
    chain::{Chain, Hook},
    expressions::Rule,
};

/// The first port that the kernel chooses for a program by default (`net.ipv4.ip_local_port_range`). Below it are the node's own
/// servers: a masqueraded reply could be taken for one to them.
const FIRST_LOCAL_PORT: u16 = 32_768;

/// The chains that leave connections to these networks of pods out, before conntrack sees them.
pub(crate) fn chains(family: Family, pods: &[IpNet]) -> Vec<Chain> {
    if pods.is_empty() {
        return Vec::new();
    }
    let to = |net: &IpNet| {
        let rule = Rule::new(family, "to a pod, from a program of the host");
        rule.if_tcp()
            .if_outgoing_interface_is_not("lo")
            .if_to(*net)
            .if_source_port_at_least(FIRST_LOCAL_PORT)
            .do_not_track()
    };
    let from = |net: &IpNet| {
        let rule = Rule::new(family, "its reply");
        rule.if_tcp()
            .if_from(*net)
            .if_destination_port_at_least(FIRST_LOCAL_PORT)
            .if_for_connected_socket()
            .do_not_track()
    };
    vec![
        Chain::base("untracked-output", Hook::OUTPUT_RAW, pods.iter().map(to).collect::<Vec<_>>()),
        Chain::base("untracked-prerouting", Hook::PREROUTING_RAW, pods.iter().map(from).collect::<Vec<_>>()),
    ]
}
