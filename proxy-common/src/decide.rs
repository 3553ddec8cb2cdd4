//! The decision: which backend, if any, for a destination, from the tables of exactly one generation.
//!
//! The one rule: a decision sees one [`Tables`], which stands for one side; nothing here can reach the other.

use crate::{
    affinity::{Affinity, AffinityKey, Client},
    counters::{Cell, UNCOUNTED},
    net::Be16,
    socket::Address,
    tables::{Frontend, LOOPBACK, OTHER, OWN, OWN_ADDRESSES_ONLY, Place, TCP, UDP},
};

/// The tables of one side, in one address family.
pub trait Tables {
    /// The family's IP address; the default is the unspecified one.
    type Ip: Copy + Default + PartialEq;
    /// The family's backend.
    type Backend: Copy + Default + PartialEq;

    /// Whether a frontend may have this address; told without a look-up.
    fn may_be_frontend(&self, ip: Self::Ip) -> bool;
    /// What stands behind a destination, if it is ours.
    fn frontend(&self, ip: Self::Ip, port: Be16, protocol: u8) -> Option<Frontend>;
    /// Whether a port lies between the least and the greatest node port.
    fn may_be_node_port(&self, port: Be16) -> bool;
    /// What stands behind a node port, if it is one.
    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend>;
    /// Whose an address is, if it is a node's.
    fn place(&self, ip: Self::Ip) -> Option<Place>;
    /// The backend at a position, and where its connections are counted.
    fn backend(&self, position: u32) -> Option<(Self::Backend, Cell)>;
    /// Where the connections of a backend are counted, if a set contains it; asked of UDP frontends and of those with
    /// affinity only.
    fn member(&self, set: u32, backend: Self::Backend) -> Option<Cell>;

    /// The IP version, 4 or 6.
    const FAMILY: u32;
    /// The backend at an address; the default for an address of the other family.
    fn backend_at(&self, address: Address) -> Self::Backend;
    /// Where a backend is.
    fn address_of(&self, backend: Self::Backend) -> Address;
}

/// Who connects or sends, as far as the decision asks.
pub trait Caller {
    /// 32 random bits.
    fn random(&self) -> u32;
    /// Whether it is in the node's own network namespace, where the loopback address is the node's.
    fn is_host(&self) -> bool;
    /// Who it is for session affinity.
    fn client(&self) -> Client;
    /// The monotonic clock in nanoseconds.
    fn now(&self) -> u64;
    /// The backend that a client was given last; the default if it is not known.
    fn affinity(&self, key: &AffinityKey) -> Affinity;
    /// Keeps the backend that a client was given, unless something else than `last` is kept of it by now: another
    /// connection of it came first. Returns the backend that is kept.
    fn keep_affinity(&self, key: &AffinityKey, last: &Affinity, affinity: &Affinity) -> Address;
    /// A connection to this service port will be counted, or that it found no backend: told before the backend is looked
    /// up, so that the cells can come into the cache meanwhile.
    fn will_count(&self, port: Cell);
}

/// What is to become of a connect or a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict<Backend> {
    /// Not ours: leave it untouched.
    Pass,
    /// Lead it to this backend.
    To(Led<Backend>),
    /// Ours, and nobody is there: fail at once.
    Refuse {
        /// The first cell of the service port.
        port: Cell,
    },
}

impl<Backend> Verdict<Backend> {
    /// The same, of backends in another form.
    #[inline(always)]
    pub fn map<Other>(self, form: impl FnOnce(Backend) -> Other) -> Verdict<Other> {
        match self {
            Self::Pass => Verdict::Pass,
            Self::Refuse { port } => Verdict::Refuse { port },
            Self::To(Led { backend, port, cell }) => Verdict::To(Led { backend: form(backend), port, cell }),
        }
    }
}

/// Where a connection or a datagram is led, and where that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Led<Backend> {
    /// The backend.
    pub backend: Backend,
    /// The first cell of the service port.
    pub port: Cell,
    /// The cell of the backend; [`UNCOUNTED`] where nothing new begins.
    pub cell: Cell,
}

/// Decides where a new connection or a datagram to `(ip, port, protocol)` goes.
///
/// `remembered` is the backend that this socket used for this destination before: it is kept while it is in the set. The
/// default stands for none; as an `Option` it would be an undefined word in the kernel, which the verifier refuses.
#[inline(always)]
pub fn decide<T: Tables>(
    tables: &T,
    caller: &impl Caller,
    ip: T::Ip,
    port: Be16,
    protocol: u8,
    remembered: T::Backend,
) -> Verdict<T::Backend> {
    if protocol != TCP && protocol != UDP {
        return Verdict::Pass;
    }
    let frontend = if tables.may_be_frontend(ip) { tables.frontend(ip, port, protocol) } else { None };
    let found = match frontend {
        Some(frontend) => Some(frontend),
        // Told by the port alone, so that what is no node port costs no second look-up.
        None if tables.may_be_node_port(port) => node_port(tables, caller, ip, port, protocol),
        None => None,
    };
    let Some(frontend) = found else {
        return Verdict::Pass;
    };
    if frontend.count == 0 {
        return Verdict::Refuse { port: frontend.cell };
    }
    if remembered != T::Backend::default() && tables.member(frontend.set, remembered).is_some() {
        return Verdict::To(Led { backend: remembered, port: frontend.cell, cell: UNCOUNTED });
    }
    caller.will_count(frontend.cell);
    let led = match frontend.affinity {
        0 => choose(tables, caller, &frontend),
        _ => affine(tables, caller, &frontend),
    };
    led.map_or(Verdict::Refuse { port: frontend.cell }, Verdict::To)
}

/// The backend that this client was given before, while it is in the set and the time-out has not passed; else another.
/// Either way it counts from now.
#[inline(always)]
fn affine<T: Tables>(tables: &T, caller: &impl Caller, frontend: &Frontend) -> Option<Led<T::Backend>> {
    let key = AffinityKey::new(caller.client(), frontend.service, T::FAMILY);
    let now = caller.now();
    let last = caller.affinity(&key);
    let backend = tables.backend_at(last.backend);
    let member =
        if last.is_alive(now, frontend.affinity) { tables.member(frontend.set, backend) } else { None };
    let led = match member {
        Some(cell) => Led { backend, port: frontend.cell, cell },
        None => choose(tables, caller, frontend)?,
    };
    let own = tables.address_of(led.backend);
    let kept = caller.keep_affinity(&key, &last, &Affinity { backend: own, zero: 0, used: now });
    if kept == own {
        return Some(led);
    }
    let backend = tables.backend_at(kept);
    match tables.member(frontend.set, backend) {
        Some(cell) => Some(Led { backend, cell, ..led }),
        None => Some(led),
    }
}

/// A backend by chance.
///
/// Every position below the count is there: a whole generation says so. Should it ever not be, failing at once is the
/// answer a client can act on.
#[inline(always)]
fn choose<T: Tables>(tables: &T, caller: &impl Caller, frontend: &Frontend) -> Option<Led<T::Backend>> {
    let position = frontend.first + scale(caller.random(), frontend.count);
    let (backend, cell) = tables.backend(position)?;
    Some(Led { backend, port: frontend.cell, cell })
}

/// What stands behind a node port at this address, for this caller.
#[inline(always)]
fn node_port<T: Tables>(
    tables: &T,
    caller: &impl Caller,
    ip: T::Ip,
    port: Be16,
    protocol: u8,
) -> Option<Frontend> {
    let frontend = tables.node_port(port, protocol)?;
    let is_served = match tables.place(ip)? {
        OWN => true,
        OTHER => frontend.flags & OWN_ADDRESSES_ONLY == 0,
        LOOPBACK => caller.is_host(),
        _ => false,
    };
    is_served.then_some(frontend)
}

/// The node port that a program on the node is about to take, by binding its port at this address or at all of them; none
/// if what comes there reaches the program.
#[inline(always)]
pub fn bound<T: Tables>(tables: &T, ip: T::Ip, port: Be16, protocol: u8) -> Option<Frontend> {
    if !tables.may_be_node_port(port) {
        return None;
    }
    let frontend = tables.node_port(port, protocol)?;
    if ip != T::Ip::default() && !matches!(tables.place(ip)?, OWN | LOOPBACK) {
        return None;
    }
    Some(frontend)
}

/// 32 bits that look random, from a number that is never used twice and a seed (the finalizer of SplitMix64; Steele, Lea and
/// Flood, 2014). Costs less than to ask the kernel for random ones.
#[inline(always)]
pub const fn mix(number: u64, seed: u64) -> u32 {
    let mut z = number ^ seed;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 32) as u32
}

/// Brings 32 random bits down to `0..count`, by multiplication (no division in the kernel's hot path).
/// The bias is below `count / 2^32`.
#[inline(always)]
const fn scale(random: u32, count: u32) -> u32 {
    ((random as u64 * count as u64) >> 32) as u32
}

#[cfg(test)]
mod tests;
