//! The decision: which backend, if any, for a destination, from the tables of exactly one generation.
//!
//! Invariant: a decision sees one [`Tables`], which stands for one side; nothing here can reach the other side.

use crate::{
    affinity::{AffinityClient, AffinityEntry, AffinityKey},
    counters::{CounterIndex, NO_COUNTER},
    net::{Be16, SockAddr, V6},
    tables::{Family, Frontend, LOCAL_ADDRESSES_ONLY, NodeAddrScope, Prefilter, TCP, UDP},
};

/// A backend in tables.
type BackendOf<T> = <<T as Tables>::Ip as Family>::Backend;

/// The tables of one side, in one address family.
pub trait Tables {
    /// The family's IP address.
    type Ip: Family;

    /// The prefilter.
    fn prefilter(&self) -> Option<&Prefilter>;
    /// The frontend at a destination.
    fn frontend(&self, ip: Self::Ip, port: Be16, protocol: u8) -> Option<Frontend>;
    /// The node port of this number.
    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend>;
    /// Which node an address belongs to, if any.
    fn node_addr_scope(&self, ip: Self::Ip) -> Option<NodeAddrScope>;
    /// The backend at a position, and the counter of its connections.
    fn backend(&self, position: u32) -> Option<(BackendOf<Self>, CounterIndex)>;
    /// The counter of a backend's connections, if the backend is a member of the set. Only looked up for UDP frontends and
    /// for those with session affinity.
    fn member(&self, set: u32, backend: BackendOf<Self>) -> Option<CounterIndex>;

    /// Whether a frontend may have this address, by the prefilter alone.
    #[inline(always)]
    fn may_be_frontend(&self, ip: Self::Ip) -> bool {
        self.prefilter().is_some_and(|it| ip.may_be_frontend(it))
    }

    /// Whether a port lies between the lowest and the highest node port, by the prefilter alone.
    #[inline(always)]
    fn may_be_node_port(&self, port: Be16) -> bool {
        self.prefilter().is_some_and(|it| it.node_ports.contains(port))
    }
}

/// The socket that connects or sends, and its process, as far as the decision depends on them.
pub trait SocketContext {
    /// Whether the process is excluded from load balancing.
    fn is_excluded(&self) -> bool;
    /// The backend that this socket used for this destination before, or unset: it is kept while it is in the set.
    /// (As an `Option` it would be an undefined word in the kernel, which the verifier rejects.) Asked only at a frontend.
    fn previous_backend(&self) -> SockAddr;
    /// 32 random bits.
    fn random(&self) -> u32;
    /// Whether the socket is in the node's own network namespace, where the loopback address is the node's.
    fn is_in_host_netns(&self) -> bool;
    /// The cookie of the socket's network namespace.
    fn netns(&self) -> u64;
    /// The address that the program has bound the socket to, IPv4 as v4-mapped; unset if none is known.
    fn bound_address(&self) -> V6;
    /// The monotonic clock in nanoseconds.
    fn now(&self) -> u64;
    /// The affinity entry of a client; the default if there is none.
    fn affinity(&self, key: &AffinityKey) -> AffinityEntry;
    /// Stores the affinity entry of a client, unless it is not `last` any more because a concurrent connection of the client
    /// was faster. Returns the backend of the entry that is stored.
    fn update_affinity(&self, key: &AffinityKey, last: &AffinityEntry, entry: &AffinityEntry) -> SockAddr;
    /// Loads the counters of a service port into the cache, before the backend is looked up: a connection, or that it found
    /// no backend, is going to be counted.
    fn prefetch_counters(&self, port_counter: CounterIndex);
}

/// The decision on a connect or a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict<Backend = SockAddr> {
    /// No Service: leave the destination as it is.
    Pass,
    /// Rewrite the destination.
    Redirect(Selection<Backend>),
    /// A Service without backends: fail at once.
    Refuse {
        /// The first counter of the service port.
        port_counter: CounterIndex,
    },
}

/// The backend of a connection or a datagram, and where that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection<Backend = SockAddr> {
    /// The backend.
    pub backend: Backend,
    /// The first counter of the service port.
    pub port_counter: CounterIndex,
    /// The counter of the backend; [`NO_COUNTER`] for a datagram that is not the first to this backend.
    pub backend_counter: CounterIndex,
}

/// Decides where a new connection or a datagram to `(ip, port, protocol)` goes.
///
/// The probe address is redirected to the loopback address if nothing else matches, also for an excluded process.
#[inline(always)]
pub fn decide<T: Tables>(
    tables: &T,
    socket: &impl SocketContext,
    ip: T::Ip,
    port: Be16,
    protocol: u8,
) -> Verdict {
    if protocol != TCP && protocol != UDP {
        return Verdict::Pass;
    }
    let verdict = match socket.is_excluded() {
        true => Verdict::Pass,
        false => decide_by_tables(tables, socket, ip, port, protocol),
    };
    match verdict {
        Verdict::Pass if ip == T::Ip::PROBE => Verdict::Redirect(Selection {
            backend: SockAddr::new(T::Ip::LOOPBACK.mapped(), port),
            port_counter: NO_COUNTER,
            backend_counter: NO_COUNTER,
        }),
        Verdict::Pass => Verdict::Pass,
        Verdict::Refuse { port_counter } => Verdict::Refuse { port_counter },
        Verdict::Redirect(Selection { backend, port_counter, backend_counter }) => {
            Verdict::Redirect(Selection { backend: T::Ip::sock_addr(backend), port_counter, backend_counter })
        }
    }
}

#[inline(always)]
fn decide_by_tables<T: Tables>(
    tables: &T,
    socket: &impl SocketContext,
    ip: T::Ip,
    port: Be16,
    protocol: u8,
) -> Verdict<BackendOf<T>> {
    let frontend = if tables.may_be_frontend(ip) { tables.frontend(ip, port, protocol) } else { None };
    let found = match frontend {
        Some(frontend) => Some(frontend),
        // Decided by the port alone, so that other ports cost no second look-up.
        None if tables.may_be_node_port(port) => node_port(tables, socket, ip, port, protocol),
        None => None,
    };
    let Some(frontend) = found else {
        return Verdict::Pass;
    };
    let port_counter = frontend.counter;
    if frontend.backend_count == 0 {
        return Verdict::Refuse { port_counter };
    }
    let previous = T::Ip::backend_at(socket.previous_backend());
    if previous != Default::default() && tables.member(frontend.set, previous).is_some() {
        return Verdict::Redirect(Selection { backend: previous, port_counter, backend_counter: NO_COUNTER });
    }
    socket.prefetch_counters(port_counter);
    let selection = match frontend.affinity_timeout {
        0 => select_random(tables, socket, &frontend),
        _ => select_with_affinity(tables, socket, &frontend),
    };
    selection.map_or(Verdict::Refuse { port_counter }, Verdict::Redirect)
}

/// The backend that this client was given before, while it is in the set and the entry has not expired; else another one.
/// Either way the timeout starts again.
#[inline(always)]
fn select_with_affinity<T: Tables>(
    tables: &T,
    socket: &impl SocketContext,
    frontend: &Frontend,
) -> Option<Selection<BackendOf<T>>> {
    let client = affinity_client(tables, socket);
    let key = AffinityKey::new(client, frontend.service_port, u32::from(T::Ip::VERSION));
    let now = socket.now();
    let last = socket.affinity(&key);
    let backend = T::Ip::backend_at(last.backend);
    let member = if last.is_alive(now, frontend.affinity_timeout) {
        tables.member(frontend.set, backend)
    } else {
        None
    };
    let selection = match member {
        Some(backend_counter) => Selection { backend, port_counter: frontend.counter, backend_counter },
        None => select_random(tables, socket, frontend)?,
    };
    let selected = T::Ip::sock_addr(selection.backend);
    let stored =
        socket.update_affinity(&key, &last, &AffinityEntry { backend: selected, zero: 0, used: now });
    if stored == selected {
        return Some(selection);
    }
    let backend = T::Ip::backend_at(stored);
    match tables.member(frontend.set, backend) {
        Some(backend_counter) => Some(Selection { backend, backend_counter, ..selection }),
        None => Some(selection),
    }
}

/// The client that session affinity applies to: a pod, by its network namespace, or one of the node's own addresses.
///
/// Any process may bind any address (IP_FREEBIND), and two pods may have the same one. Only an address of the node that the
/// cluster knows is a client of its own, and only in the node's own namespace.
#[inline(always)]
fn affinity_client<T: Tables>(tables: &T, socket: &impl SocketContext) -> AffinityClient {
    let bound = socket.bound_address();
    if bound != V6::default()
        && socket.is_in_host_netns()
        && let Some(ip) = T::Ip::from_mapped(bound)
        && tables.node_addr_scope(ip) == Some(NodeAddrScope::LOCAL)
    {
        return AffinityClient::Address(bound);
    }
    AffinityClient::Namespace(socket.netns())
}

/// A random backend.
///
/// Every position below the count exists, as generations are complete. If one ever did not, failing at once is an answer
/// that a client can act on.
#[inline(always)]
fn select_random<T: Tables>(
    tables: &T,
    socket: &impl SocketContext,
    frontend: &Frontend,
) -> Option<Selection<BackendOf<T>>> {
    let position = frontend.backend_offset + scale(socket.random(), frontend.backend_count);
    let (backend, backend_counter) = tables.backend(position)?;
    Some(Selection { backend, port_counter: frontend.counter, backend_counter })
}

/// The node port at this address, if it is served there for this socket.
#[inline(always)]
fn node_port<T: Tables>(
    tables: &T,
    socket: &impl SocketContext,
    ip: T::Ip,
    port: Be16,
    protocol: u8,
) -> Option<Frontend> {
    let frontend = tables.node_port(port, protocol)?;
    let is_served = match tables.node_addr_scope(ip)? {
        NodeAddrScope::LOCAL => true,
        NodeAddrScope::REMOTE => frontend.flags & LOCAL_ADDRESSES_ONLY == 0,
        NodeAddrScope::LOOPBACK => socket.is_in_host_netns(),
        _ => false,
    };
    is_served.then_some(frontend)
}

/// The node port that shadows a bind on the node to this address, or to every address: its connections would go to the
/// Service and never reach the program.
#[inline(always)]
pub fn node_port_conflict<T: Tables>(tables: &T, ip: T::Ip, port: Be16, protocol: u8) -> Option<Frontend> {
    if !tables.may_be_node_port(port) {
        return None;
    }
    let frontend = tables.node_port(port, protocol)?;
    if ip != T::Ip::default()
        && !matches!(tables.node_addr_scope(ip)?, NodeAddrScope::LOCAL | NodeAddrScope::LOOPBACK)
    {
        return None;
    }
    Some(frontend)
}

/// 32 bits that look random, from a number that is never used twice and a seed (the finalizer of SplitMix64; Steele, Lea and
/// Flood, 2014). Cheaper than the kernel's random numbers.
#[inline(always)]
pub const fn mix(number: u64, seed: u64) -> u32 {
    let mut z = number ^ seed;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 32) as u32
}

/// Scales 32 random bits to `0..count` by multiplication (no division in the kernel's hot path).
/// The bias is below `count / 2^32`.
#[inline(always)]
const fn scale(random: u32, count: u32) -> u32 {
    ((random as u64 * count as u64) >> 32) as u32
}

#[cfg(test)]
mod tests;
