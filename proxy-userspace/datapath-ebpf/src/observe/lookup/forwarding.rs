//! What becomes of packets from outside to one frontend: the rows of its nodes, and that of one flow.
//!
//! Invariant: a flow is decided on by the function that the kernel calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use datapath::FrontendAddress;
use proxy_common::{
    forward::{self, Flow, Forward, NO_NODE, NodeNumber, Row, THIS_NODE},
    net::{Be16, V4, V6},
    tables::FrontendKey6,
};

use crate::{
    error::Error,
    observe::{
        active_frontends::ActiveFrontends,
        forwards::{ForwardTables, uplink_names},
    },
    tables::layout::forwarding::frontend_key,
};

/// What becomes of packets from outside to a frontend that is forwarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardLookup {
    /// How many rows the frontend has.
    pub rows: u32,
    /// Whether the client's address alone selects the row (session affinity).
    pub by_client: bool,
    /// Whether forwarding has ended, and only connections that exist are forwarded.
    pub has_ended: bool,
    /// How many rows each node owns.
    pub shares: BTreeMap<RowNode, u32>,
    /// The row of the flow, if the question names one.
    pub row: Option<FlowRow>,
    /// The names of the interfaces at which the programs are attached.
    pub uplinks: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRow {
    /// Its number among those of the frontend, from 0 on.
    pub number: u32,
    /// The node that serves its flows.
    pub owner: RowNode,
    /// The node that owned it before, if any.
    pub second: Option<RowNode>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowNode {
    /// This node, with the address at which it receives packets of other nodes.
    This(IpAddr),
    /// Another node, by the address at which it receives packets; unspecified if it has left the cluster.
    Other(IpAddr),
    /// None: this node translates its packets.
    None,
}

/// The client of a flow; its port is known if the question names it.
pub type FlowClient = (IpAddr, Option<u16>);

/// Reads what becomes of packets from outside to a destination; `None` if they are not forwarded.
///
/// # Errors
///
/// As for [`dump`](crate::observe::dump).
pub fn forward_lookup(
    pin_dir: &Path,
    destination: &FrontendAddress,
    client: Option<FlowClient>,
) -> Result<Option<ForwardLookup>, Error> {
    let Some(key) = frontend_key(destination) else { return Ok(None) };
    let (_, tables) = ActiveFrontends::open(pin_dir)?.read(|maps| ForwardTables::read_one(maps, key))?;
    let Some(found) = tables.lookup(key, client) else { return Ok(None) };
    Ok(Some(ForwardLookup { uplinks: uplink_names(pin_dir)?, ..found }))
}

impl forward::ForwardTables for ForwardTables {
    fn forward(&self, frontend: FrontendKey6) -> Option<Forward> {
        self.forwards.get(&frontend).copied()
    }

    fn row(&self, position: u32) -> Option<Row> {
        self.rows.get(&position).copied()
    }
}

impl ForwardTables {
    fn lookup(&self, key: FrontendKey6, client: Option<FlowClient>) -> Option<ForwardLookup> {
        let forward = *self.forwards.get(&key)?;
        let is_v4 = V4::from_mapped(key.address).is_some();
        let by_client = forward.is_by_client();
        let mut shares = BTreeMap::new();
        for row in self.rows_of(forward) {
            *shares.entry(self.node(row.owner(), is_v4)).or_default() += 1;
        }
        // Without session affinity each port has a row of its own.
        let flow = client.filter(|(ip, port)| ip.is_ipv4() == is_v4 && (by_client || port.is_some()));
        let row = flow.map(|(ip, port)| {
            let flow = Flow {
                source: V6::from(ip),
                destination: key.address,
                source_port: Be16::new(port.unwrap_or_default()),
                destination_port: key.port,
                protocol: key.protocol,
                continues: true,
            };
            let row = forward::row(self, &forward, &flow).unwrap_or_default();
            FlowRow {
                number: flow.hash(by_client) & forward.mask,
                owner: self.node(row.owner(), is_v4),
                second: (row.second() != NO_NODE).then(|| self.node(row.second(), is_v4)),
            }
        });
        let (rows, uplinks) = (forward.mask.saturating_add(1), BTreeSet::new());
        Some(ForwardLookup { rows, by_client, has_ended: forward.has_ended(), shares, row, uplinks })
    }

    fn node(&self, number: NodeNumber, is_v4: bool) -> RowNode {
        match number {
            NO_NODE => RowNode::None,
            THIS_NODE => RowNode::This(self.address(number, is_v4)),
            number => RowNode::Other(self.address(number, is_v4)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use model::Protocol;
    use proxy_common::forward::ForwardNode;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn key(text: &str) -> FrontendKey6 {
        let address = text.parse().unwrap();
        frontend_key(&FrontendAddress { address, protocol: Protocol::Tcp }).unwrap()
    }

    /// The node 1 is this one, 2 owned its rows before, and 3 has left the cluster.
    fn tables(rows: &[Row], flags: u32) -> ForwardTables {
        let node = |v4: [u8; 4]| ForwardNode { v4: V4::from_raw(u32::from_ne_bytes(v4)), v6: V6::default() };
        let forward = Forward { first: 8, mask: rows.len() as u32 - 1, flags, ..Forward::default() };
        ForwardTables {
            forwards: [(key("203.0.113.1:80"), forward)].into(),
            rows: (8..).zip(rows.iter().copied()).collect(),
            nodes: [(1, node([192, 0, 2, 1])), (2, node([192, 0, 2, 2]))].into(),
        }
    }

    const THIS: RowNode = RowNode::This(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)));
    const OTHER: RowNode = RowNode::Other(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)));

    #[test]
    fn the_shares_of_all_nodes_are_counted() {
        let rows = [Row::new(1, 2), Row::new(1, 0), Row::new(2, 0), Row::new(3, 1)];
        let found = tables(&rows, 0).lookup(key("203.0.113.1:80"), None).unwrap();
        let gone = RowNode::Other(ip("0.0.0.0"));
        assert_eq!(found.shares, [(THIS, 2), (OTHER, 1), (gone, 1)].into());
        assert_eq!((found.rows, found.by_client, found.row), (4, false, None));
        assert_eq!(tables(&rows, 0).lookup(key("203.0.113.1:81"), None), None);
    }

    #[test]
    fn a_flow_has_the_row_that_the_kernel_selects() {
        let rows = [Row::new(1, 2), Row::new(2, 0), Row::new(1, 0), Row::new(2, 1)];
        for port in 1..100 {
            let client = (ip("198.51.100.7"), Some(port));
            let row = tables(&rows, 0).lookup(key("203.0.113.1:80"), Some(client)).unwrap().row.unwrap();
            let expect = [(THIS, Some(OTHER)), (OTHER, None), (THIS, None), (OTHER, Some(THIS))];
            assert_eq!((row.owner, row.second), expect[row.number as usize], "{port}");
        }
    }

    #[test]
    fn a_row_is_known_without_a_port_only_with_session_affinity() {
        let rows = [Row::new(1, 0), Row::new(2, 0)];
        let row = |by_client, client| {
            tables(&rows, by_client).lookup(key("203.0.113.1:80"), Some(client)).unwrap().row
        };
        let client = ip("198.51.100.7");
        assert_eq!(row(0, (client, None)), None);
        assert_eq!(row(1, (ip("2001:db8::7"), None)), None, "of another family");
        let with_affinity = row(1, (client, None)).unwrap();
        assert_eq!(row(1, (client, Some(40_000))), Some(with_affinity));
    }

    #[test]
    fn a_row_without_an_owner_is_of_no_node() {
        let tables = tables(&[Row::new(NO_NODE, NO_NODE)], 0);
        let client = (ip("198.51.100.7"), Some(1));
        let found = tables.lookup(key("203.0.113.1:80"), Some(client)).unwrap();
        assert_eq!(found.shares, [(RowNode::None, 1)].into());
        assert_eq!(found.row, Some(FlowRow { number: 0, owner: RowNode::None, second: None }));
    }
}
