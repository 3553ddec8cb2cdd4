//! The decision: which backend, if any, for a destination, from the tables of exactly one generation.
//!
//! Invariant: a decision sees one [`Tables`], which stands for one side; nothing here can reach the other side.

use crate::{
    affinity::{AffinityClient, AffinityEntry, AffinityKey},
    choice::{Choice, NO_POSITION},
    counters::{CounterIndex, LEFT_TO_PACKETS, NO_BACKEND, NO_COUNTER},
    health::{Watch, client},
    net::{Be16, SockAddr, V6},
    random::scale,
    tables::{Family, Frontend, NodeAddrScope, Prefilter, TCP, UDP},
};

type BackendOf<T> = <<T as Tables>::Ip as Family>::Backend;

/// The tables of one side, in one address family.
pub trait Tables {
    type Ip: Family;

    fn side(&self) -> u32;
    fn prefilter(&self) -> Option<&Prefilter>;
    fn frontend(&self, ip: Self::Ip, port: Be16, protocol: u8) -> Option<Frontend>;
    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend>;
    /// Which node an address belongs to, if any.
    fn node_addr_scope(&self, ip: Self::Ip) -> Option<NodeAddrScope>;
    /// The backend at a position, and the counter of its connections.
    fn backend(&self, position: u32) -> Option<(BackendOf<Self>, CounterIndex)>;
    /// The counter of a backend's connections, if the backend is a member of the set. Only looked up for UDP frontends and
    /// for those with session affinity.
    fn member(&self, set: u32, backend: BackendOf<Self>) -> Option<CounterIndex>;
    /// [`choose`](crate::choice::choose).
    fn choose(&self, choice: Choice, first: CounterIndex) -> u32;

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

/// What the program of a socket has chosen of the source and the way of its packets.
pub trait SocketOrigin {
    /// Whether it has chosen the interface that they leave through.
    fn has_chosen_interface(&self, protocol: u8) -> bool;
    /// Whether it has bound the socket to a port of its own choice.
    fn has_chosen_port(&self) -> bool;
    /// The address that it has bound the socket to, IPv4 as v4-mapped; unset if none is known.
    fn bound_address(&self) -> V6;
    /// Whether the socket is in the node's own network namespace, where the loopback address is the node's.
    fn is_in_host_netns(&self) -> bool;
}

/// The socket that connects or sends, and its process, as far as the decision depends on them.
pub trait SocketContext {
    /// What its program has chosen of the source and the way of its packets.
    fn origin(&self) -> impl SocketOrigin;
    /// Whether the process is excluded from load balancing.
    fn is_excluded(&self) -> bool;
    /// The backend that this socket used for this destination before, or unset: it is kept while it is in the set.
    /// (As an `Option` it would be an undefined word in the kernel, which the verifier rejects.) Asked only at a frontend.
    fn previous_backend(&self) -> SockAddr;
    /// Whether the packet path translates what is left to it.
    fn packets_serve(&self) -> bool;
    /// Whether the socket, or another one at its port, has just received a datagram from this address. Asked only at a
    /// frontend that is no cluster IP.
    fn has_just_heard(&self, peer: &SockAddr) -> bool;
    /// [`only_packets_reach`].
    fn is_reached_by_packets_only<T: Tables>(&self, tables: &T, protocol: u8, to_loopback: bool) -> bool;
    fn random(&self) -> u32;
    fn netns(&self) -> u64;
    /// The monotonic clock in nanoseconds.
    fn now(&self) -> u64;
    /// The affinity entry of a client; the default if there is none.
    fn affinity(&self, key: &AffinityKey) -> AffinityEntry;
    /// Stores the affinity entry of a client, unless it is not `last` any more because a concurrent connection of the client
    /// was faster. Returns the backend of the entry that is stored.
    fn update_affinity(&self, key: &AffinityKey, last: &AffinityEntry, entry: &AffinityEntry) -> SockAddr;
    /// Whether this call chooses a backend by what is known of them: the frontend says so, or some client has a record of
    /// failures.
    fn uses_backend_states(&self, frontend: &Frontend) -> bool;
    /// Loads what is kept for this socket into the cache, as soon as there probably is a frontend.
    fn prefetch_socket(&self);
    /// Loads the counters of a service port into the cache, before the backend is looked up: a connection, or that it found
    /// no backend, is going to be counted.
    fn prefetch_counters(&self, port_counter: CounterIndex);
}

/// The decision on a connect or a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict<Backend = SockAddr> {
    /// No Service: leave the destination as it is.
    Pass,
    Redirect(Selection<Backend>),
    /// A Service without backends: fail at once.
    Refuse {
        /// The first counter of the service port.
        port_counter: CounterIndex,
    },
    /// A Service that the packet path translates for this socket: leave the destination as it is. It translates nothing to a
    /// loopback address: what is left there is refused, or reaches a program of the node.
    Leave {
        /// The counter of the reason: of the calls left to packets, or of those that found no backend.
        counter: CounterIndex,
    },
}

/// The backend of a connection or a datagram, and where that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection<Backend = SockAddr> {
    pub backend: Backend,
    /// The first counter of the service port.
    pub port_counter: CounterIndex,
    /// The counter of the backend; [`NO_COUNTER`] for a datagram that is not the first to this backend.
    pub backend_counter: CounterIndex,
    /// The failures that the connection is going to report.
    pub watch: Watch,
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
            watch: Watch::NONE,
        }),
        Verdict::Pass => Verdict::Pass,
        Verdict::Refuse { port_counter } => Verdict::Refuse { port_counter },
        Verdict::Leave { counter } => Verdict::Leave { counter },
        Verdict::Redirect(Selection { backend, port_counter, backend_counter, watch }) => {
            let backend = T::Ip::sock_addr(backend);
            Verdict::Redirect(Selection { backend, port_counter, backend_counter, watch })
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
    let frontend = if tables.may_be_frontend(ip) {
        socket.prefetch_socket();
        tables.frontend(ip, port, protocol)
    } else {
        None
    };
    let found = match frontend {
        Some(frontend) => Some(frontend),
        // Decided by the port alone, so that other ports cost no second look-up.
        None if tables.may_be_node_port(port) => {
            node_port(tables, ip, port, protocol, || socket.origin().is_in_host_netns())
                .inspect(|_| socket.prefetch_socket())
        }
        None => None,
    };
    let Some(frontend) = found else {
        return Verdict::Pass;
    };
    let port_counter = frontend.counter;
    let is_udp = protocol == UDP;
    let is_empty = frontend.backend_count == 0;
    let to_loopback = ip.is_loopback();
    let is_left = || {
        is_empty && is_udp
            || frontend.options.is_to_packets() && !to_loopback
            || socket.is_reached_by_packets_only(tables, protocol, to_loopback)
    };
    if socket.packets_serve() && is_left() {
        return Verdict::Leave {
            counter: port_counter + if is_empty { NO_BACKEND } else { LEFT_TO_PACKETS },
        };
    }
    if is_udp && frontend.options.is_external() && socket.has_just_heard(&SockAddr::new(ip.mapped(), port)) {
        return Verdict::Pass;
    }
    if is_empty {
        return Verdict::Refuse { port_counter };
    }
    let previous = T::Ip::backend_at(socket.previous_backend());
    if previous != Default::default() && tables.member(frontend.set, previous).is_some() {
        return Verdict::Redirect(Selection {
            backend: previous,
            port_counter,
            backend_counter: NO_COUNTER,
            watch: Watch::NONE,
        });
    }
    socket.prefetch_counters(port_counter);
    let selection = match frontend.affinity_timeout {
        0 => select_random(tables, socket, &frontend),
        _ => select_with_affinity(tables, socket, &frontend),
    };
    selection.map_or(Verdict::Refuse { port_counter }, Verdict::Redirect)
}

/// Whether the program of the socket has chosen the source or the way of its packets, so that only translated packets may
/// reach a backend:
///
/// - The interface may lead to the Service's address alone.
/// - A connection from this port to the same backend may exist, through another Service.
/// - In the node's network namespace, backends may have no way back to the address that the socket is bound to, or the
///   kernel none from there to them (loopback). A pod's address is known to all backends.
///
/// Packets to a loopback address are not translated: there, only a socket that is bound to one is left, and refused.
#[inline(always)]
pub fn only_packets_reach<T: Tables>(
    tables: &T,
    socket: &impl SocketOrigin,
    protocol: u8,
    to_loopback: bool,
) -> bool {
    if to_loopback {
        return socket.bound_address().is_loopback();
    }
    if socket.has_chosen_interface(protocol) || (protocol == TCP && socket.has_chosen_port()) {
        return true;
    }
    // Read again rather than kept on the stack, where there is little room.
    socket.bound_address() != V6::default()
        && socket.is_in_host_netns()
        && T::Ip::from_mapped(socket.bound_address())
            .is_some_and(|it| tables.node_addr_scope(it) != Some(NodeAddrScope::LOCAL))
}

/// A new connection to a backend of the frontend.
#[inline(always)]
const fn selected<Backend>(
    frontend: &Frontend,
    (backend, backend_counter): (Backend, CounterIndex),
) -> Selection<Backend>
where
    Backend: Copy,
{
    let watch = Watch::new(backend_counter, frontend.health, frontend.options.least_connections());
    Selection { backend, port_counter: frontend.counter, backend_counter, watch }
}

/// The backend that this client was given before, while it is in the set and the entry has not expired; else another one.
/// Either way the timeout starts again.
#[inline(always)]
fn select_with_affinity<T: Tables>(
    tables: &T,
    socket: &impl SocketContext,
    frontend: &Frontend,
) -> Option<Selection<BackendOf<T>>> {
    let key =
        AffinityKey::new(affinity_client(tables, socket), frontend.service_port, u32::from(T::Ip::VERSION));
    let now = socket.now();
    let last = socket.affinity(&key);
    let backend = T::Ip::backend_at(last.backend);
    let member = if last.is_alive(now, frontend.affinity_timeout) {
        tables.member(frontend.set, backend)
    } else {
        None
    };
    let first = member.unwrap_or(NO_COUNTER);
    let position = if socket.uses_backend_states(frontend) {
        let client = client(socket.netns());
        // While its backend is ejected, the client has another one, the same for all of its connections: selected by its
        // name.
        let random = if member.is_some() { client } else { socket.random() };
        tables.choose(Choice::of(frontend, client, random), first)
    } else if member.is_some() {
        NO_POSITION
    } else {
        frontend.backend_offset + scale(socket.random(), frontend.backend_count)
    };
    let selection = match position {
        NO_POSITION => selected(frontend, (backend, first)),
        position => selected(frontend, tables.backend(position)?),
    };
    let kept = if member.is_some() { last.backend } else { T::Ip::sock_addr(selection.backend) };
    let stored = socket.update_affinity(&key, &last, &AffinityEntry { backend: kept, zero: 0, used: now });
    if stored == kept {
        return Some(selection);
    }
    let backend = T::Ip::backend_at(stored);
    match tables.member(frontend.set, backend) {
        Some(counter) => Some(selected(frontend, (backend, counter))),
        None => Some(selection),
    }
}

/// The client that session affinity applies to: a pod, by its network namespace, or one of the node's own addresses.
///
/// Any process may bind any address (IP_FREEBIND), and two pods may have the same one. Only an address of the node that the
/// cluster knows is a client of its own, and only in the node's own namespace.
#[inline(always)]
fn affinity_client<T: Tables>(tables: &T, socket: &impl SocketContext) -> AffinityClient {
    let bound = socket.origin().bound_address();
    if bound != V6::default()
        && socket.origin().is_in_host_netns()
        && let Some(ip) = T::Ip::from_mapped(bound)
        && tables.node_addr_scope(ip).is_some_and(NodeAddrScope::is_local)
    {
        return AffinityClient::Address(bound);
    }
    AffinityClient::Namespace(socket.netns())
}

/// A random backend, or the one that the options of the frontend prefer. It is not ejected if there is another one.
///
/// Every position below the count exists, as generations are complete. If one ever did not, failing at once is an answer
/// that a client can act on.
#[inline(always)]
fn select_random<T: Tables>(
    tables: &T,
    socket: &impl SocketContext,
    frontend: &Frontend,
) -> Option<Selection<BackendOf<T>>> {
    let random = socket.random();
    let position = if socket.uses_backend_states(frontend) {
        tables.choose(Choice::of(frontend, client(socket.netns()), random), NO_COUNTER)
    } else {
        frontend.backend_offset + scale(random, frontend.backend_count)
    };
    Some(selected(frontend, tables.backend(position)?))
}

/// The node port at this address, if it is served there for a socket in this network namespace.
#[inline(always)]
fn node_port<T: Tables>(
    tables: &T,
    ip: T::Ip,
    port: Be16,
    protocol: u8,
    is_in_host_netns: impl FnOnce() -> bool,
) -> Option<Frontend> {
    let frontend = tables.node_port(port, protocol)?;
    let is_served = match tables.node_addr_scope(ip)? {
        NodeAddrScope::LOCAL | NodeAddrScope::INTERFACE => true,
        NodeAddrScope::REMOTE => !frontend.options.local_addresses_only(),
        NodeAddrScope::LOOPBACK => is_in_host_netns(),
        _ => false,
    };
    is_served.then_some(frontend)
}

/// Whether a datagram to this source of another one would be taken for one to a Service.
#[inline(always)]
pub fn may_be_hijacked<T: Tables>(
    tables: &T,
    ip: T::Ip,
    port: Be16,
    is_in_host_netns: impl FnOnce() -> bool,
) -> bool {
    if tables.may_be_frontend(ip)
        && let Some(frontend) = tables.frontend(ip, port, UDP)
    {
        return frontend.options.is_external();
    }
    tables.may_be_node_port(port) && node_port(tables, ip, port, UDP, is_in_host_netns).is_some()
}

/// The node port that shadows a bind on the node to this address, or to every address: its connections would go to the
/// Service and never reach the program.
#[inline(always)]
pub fn node_port_conflict<T: Tables>(tables: &T, ip: T::Ip, port: Be16, protocol: u8) -> Option<Frontend> {
    if !tables.may_be_node_port(port) {
        return None;
    }
    let frontend = tables.node_port(port, protocol)?;
    if ip != T::Ip::default() && tables.node_addr_scope(ip)? == NodeAddrScope::REMOTE {
        return None;
    }
    Some(frontend)
}

#[cfg(test)]
mod tests;
