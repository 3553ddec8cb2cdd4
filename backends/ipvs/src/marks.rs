//! Marks of packets: which are of this program, what their bits say, and which virtual server has which.
//!
//! Invariant: a virtual server keeps its mark, also in a new process.

use std::collections::{BTreeMap, BTreeSet};

use proxy_contract::{backend::Family, localv1::Protocol};

/// The bits by which a mark is known as one of this program.
pub(crate) const MASK: u32 = 0xff00_0000;
/// The value of these bits before IPVS; with it, an address is local.
pub(crate) const PREFIX: u32 = 0x6b00_0000;
/// The value of these bits after IPVS.
pub(crate) const BALANCED: u32 = 0x6c00_0000;
/// The mark of a new connection that is refused.
pub(crate) const REFUSE: u32 = PREFIX;
/// The mark of a new connection that is dropped.
pub(crate) const DROP: u32 = PREFIX | 1;
/// In the mark of a virtual server: which sources are masqueraded, as [`Masquerade`].
pub(crate) const MASQUERADE: u32 = 0b011;
/// In the mark of a virtual server: it has no connections that could be drained.
const CONNECTIONLESS: u32 = 0b100;
/// The number of a virtual server begins here.
const NUMBER: u32 = 0b1000;

/// Whose source address is replaced by one of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Masquerade {
    Never = 0,
    /// Of traffic from outside.
    Outside = 1,
    /// Of all traffic, since a reply of an endpoint elsewhere may not come back through this node.
    All = 2,
}

/// A virtual server within its Service: protocol, name of the port, family, the first of its traffic, and its masquerading.
pub(crate) type Id = (i32, String, Family, u8, Masquerade);

/// The name of a set or map, and a key as `nft` writes it.
pub(crate) type Key = (String, String);

/// The marks of virtual servers, each used once.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Marks in use, by a plan or in the kernel.
    pub(crate) taken: BTreeSet<u32>,
    /// Marks that a former process has written to its maps: its virtual servers are continued.
    pub(crate) found: BTreeMap<Key, u32>,
    next: u32,
}

impl Marks {
    /// The mark of a new virtual server: that with which a former process marked the same traffic, or a new one.
    pub(crate) fn allocate(&mut self, id: &Id, first: &Key) -> u32 {
        let udp = if id.0 == i32::from(Protocol::Udp) { CONNECTIONLESS } else { 0 };
        let low = id.4 as u32 | udp;
        let found = self.found.remove(first).filter(|it| it & (NUMBER - 1) == low && it & MASK == PREFIX);
        if let Some(mark) = found.filter(|it| *it >= PREFIX | NUMBER) {
            // The same mark at other addresses is of this one, too, or of no use.
            self.found.retain(|_, it| *it != mark);
            return mark;
        }
        loop {
            self.next = (self.next + NUMBER) & !MASK;
            let mark = PREFIX | self.next.max(NUMBER) | low;
            if self.taken.insert(mark) {
                return mark;
            }
        }
    }
}

/// Whether connections of a virtual server continue when an endpoint is removed.
pub(crate) fn is_drained(mark: u32) -> bool {
    mark & CONNECTIONLESS == 0
}
