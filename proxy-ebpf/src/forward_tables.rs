//! What a generation says of packets that are forwarded.

use proxy_common::{
    forward::{Forward, ForwardTables, NO_NODE, NodeNumber, Row, RowPair},
    tables::FrontendKey6,
};

use crate::{
    maps::{FORWARD_NODES, FORWARD_NUMBERS, FORWARD_ROWS, FORWARDS},
    packet_family::PacketFamily,
    side::Side,
};

// SAFETY of every `get` below: user space never writes to the tables of a side that a program may still be reading.

impl<F> ForwardTables for Side<F> {
    #[inline(always)]
    fn forward(&self, frontend: FrontendKey6) -> Option<Forward> {
        // SAFETY: see above.
        unsafe { FORWARDS.get(self.index)?.get(frontend) }.copied()
    }

    #[inline(always)]
    fn row(&self, position: u32) -> Option<Row> {
        Some(FORWARD_ROWS.get(self.index)?.get(RowPair::of(position))?.row(position))
    }
}

impl<F: PacketFamily> Side<F> {
    #[inline(always)]
    pub(crate) fn node(&self, number: NodeNumber) -> Option<F> {
        if number == NO_NODE {
            return None;
        }
        F::of_node(FORWARD_NODES.get(self.index)?.get(number.into())?)
    }

    #[inline(always)]
    pub(crate) fn number(&self, address: F) -> Option<NodeNumber> {
        // SAFETY: see above.
        unsafe { FORWARD_NUMBERS.get(self.index)?.get(address.mapped()) }.map(|it| *it as NodeNumber)
    }
}
