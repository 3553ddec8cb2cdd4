//! The lines of log of a decision, by aya-log. The product has none of them: only builds with the feature `log`, which
//! includes `trace`, do.
//!
//! Invariant: a line is said in a function of its own that is not inlined. The verifier checks that once, and it needs 32 bytes
//! of the stack. A line without room is lost; the count of all lines shows it. aya-log has the kernel wake a reader: none waits.
//!
//! Each line begins with the cookie of its socket, so that a reader can put it below its decision; a line with a time is the
//! last one of a decision, or of a socket.

#[cfg(feature = "log")]
use aya_log_ebpf::macro_support::{Level, level_enabled};

#[cfg(feature = "log")]
use crate::{
    ctx::now,
    log_support::{SCOPES, VERDICTS, count, is_paused, name},
};

/// The context of a program that says lines.
pub(crate) trait LogContext {
    /// The cookie of the socket; 0 if no lines are said of it.
    fn logged_socket(&self) -> u64;
}

/// Defines functions that say a line: `name(socket, fields…) Level, level!(message, arguments…)`. They say nothing of the
/// socket 0.
macro_rules! lines {
    ($(
        $(#[$doc:meta])*
        $name:ident($socket:ident $(, $field:ident)*) $level:ident, $log:ident!($($arguments:tt)*);
    )*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(crate) fn $name(ctx: &impl LogContext $(, $field: impl Into<u64>)*) {
            #[cfg(feature = "log")]
            {
                #[unsafe(export_name = concat!("log_", stringify!($name)))]
                #[inline(never)]
                extern "C" fn say($socket: u64 $(, $field: u64)*) -> u64 {
                    if $socket != 0 {
                        if !is_paused() {
                            aya_log_ebpf::$log!((), target: "", $($arguments)*);
                        }
                        count();
                    }
                    0
                }
                if level_enabled(Level::$level) {
                    say(ctx.logged_socket() $(, $field.into())*);
                }
            }
            #[cfg(not(feature = "log"))]
            let _ = (ctx $(, $field)*);
        }
    )*};
}

lines! {
    /// The destination is in a network of Services.
    prefilter_hit(socket) Debug, debug!("socket={} prefilter: hit", socket);
    /// It is in none.
    prefilter_miss(socket) Trace, trace!("socket={} prefilter: miss", socket);
    /// The destination was looked up among the frontends: 1 if there is one, its set, and how many endpoints that has.
    frontend(socket, found, set, endpoints) Debug,
        debug!("socket={} frontend: looked up found={} set={} endpoints={}", socket, found, set, endpoints);
    /// The port was looked up among the node ports: the same.
    node_port(socket, found, set, endpoints) Debug,
        debug!("socket={} node port: looked up found={} set={} endpoints={}", socket, found, set, endpoints);
    /// The [`NodeAddrScope`](proxy_common::tables::NodeAddrScope) of an address; 0 if it belongs to no node.
    node_address(socket, scope) Debug, debug!("socket={} node address: {}", socket, name(&SCOPES, scope));
    /// The affinity entry of the client was looked up: 1 if there is one, and its age.
    affinity(socket, found, milliseconds) Debug,
        debug!("socket={} affinity: looked up found={} idle_ms={}", socket, found, milliseconds);
    /// An endpoint was looked up in a set: 1 if it is a member.
    member(socket, set, found) Debug, debug!("socket={} member: looked up set={} found={}", socket, set, found);
    /// A position was chosen by what is known of the endpoints of a set; each is 1 if an ejected one was avoided, or is tried.
    chosen(socket, position, endpoints, avoided, tried) Debug, debug!(
        "socket={} choice: made position={} endpoints={} avoided={} tried={}",
        socket, position, endpoints, avoided, tried
    );
    /// The client keeps its endpoint, which may be ejected and is tried then.
    kept(socket, endpoints, tried) Debug,
        debug!("socket={} choice: kept endpoints={} tried={}", socket, endpoints, tried);
    endpoint(socket, position) Debug, debug!("socket={} endpoint: read position={}", socket, position);
    /// The destination has just sent a datagram to this socket, so this one is a reply.
    just_heard(socket) Debug, debug!("socket={} reply: just heard", socket);
    /// The socket has had its slot before.
    slot_owned(socket) Debug, debug!("socket={} slot: owned", socket);
    slot_claimed(socket) Debug, debug!("socket={} slot: claimed", socket);
    /// The slot belongs to another socket, or the share of the network namespace is used up.
    slot_denied(socket) Debug, debug!("socket={} slot: none", socket);
    overflow_stored(socket) Debug, debug!("socket={} overflow: stored", socket);
    overflow_full(socket) Debug, debug!("socket={} overflow: full", socket);
    /// The decision, as a verdict of [`proxy_common::trace`].
    decided(socket, verdict) Info, info!("socket={} decision: {} time={}", socket, name(&VERDICTS, verdict), now());
    established(socket) Trace, trace!("socket={} connection: established", socket);
    timed_out(socket) Trace, trace!("socket={} connection: not answered in time", socket);
    connection_refused(socket) Trace, trace!("socket={} connection: refused by the endpoint", socket);
    /// A failure of the endpoint was counted, for which it is ejected or not.
    endpoint_failed(socket, failures, ejected) Trace,
        trace!("socket={} failure: counted failures={} ejected={}", socket, failures, ejected);
    overflow_released(socket) Trace, trace!("socket={} overflow: released", socket);
    slot_freed(socket) Trace, trace!("socket={} slot: freed", socket);
    closed(socket) Trace, trace!("socket={} closed time={}", socket, now());
}
