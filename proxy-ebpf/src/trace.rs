//! Reports each decision, in the traced variant of the programs.
//!
//! Invariant: a decision is the same as in the product. An event that finds no room is counted; no reader is woken.

use core::mem::MaybeUninit;

use aya_ebpf::{
    EbpfContext,
    bindings::{
        BPF_RB_NO_WAKEUP, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB,
        bpf_sock_addr,
    },
    btf_maps::{Array, HashMap, LruHashMap, RingBuf},
    helpers::generated::{
        bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_current_comm,
        bpf_get_current_pid_tgid, bpf_ringbuf_output,
    },
    macros::btf_map,
    programs::{SockAddrContext, SockContext, SockOpsContext},
};
use proxy_common::{
    counters::{COUNTERS_PER_PORT, CounterIndex, NO_COUNTER},
    decide::{Selection, SocketContext as _, Tables as _},
    exclusion::MAX_LEVELS,
    net::{Be16, SockAddr, V4, V6},
    tables::TCP,
    trace::{
        CLOSED, CLOSED_BY_BACKEND, CONNECT, EXCLUDED, Event, FURTHER_DATAGRAM, GIVEN_UP, LEFT_TO_PACKETS,
        MAX_OPEN, MAX_PORTS, NO_ANSWER, NO_BACKENDS, NO_ROOM, PASSED, REDIRECTED, REFUSED, RESET, RING_BYTES,
        SEND, is_failed_end, is_failure,
    },
};

use crate::{
    atomic,
    caller::Caller,
    config::globals,
    ctx::{self, HookFamily, TCP_CLOSE, TCP_ESTABLISHED, TCP_SYN_SENT, now},
    log::{self, LogContext},
    side::Side,
};

#[btf_map]
static EVENTS: RingBuf<Event, RING_BYTES> = RingBuf::new();
/// How many events found no room.
#[btf_map]
static LOST: Array<u64, 1> = Array::new();
/// The connections whose end is reported, by the cookies of their sockets.
#[btf_map]
static OPEN: LruHashMap<u64, Event, { MAX_OPEN as usize }> = LruHashMap::new();
/// An event of zeroes, which an entry begins as: the stack has no room for it.
#[btf_map]
static BLANK: Array<Event, 1> = Array::new();
/// The service ports whose events are reported, by their first counters.
#[btf_map]
static PORTS: HashMap<u32, u32, { MAX_PORTS as usize }> = HashMap::new();

globals! {
    /// Not zero if only the service ports in [`PORTS`] are traced.
    BY_PORT: u64;
    /// The process that is traced; 0 for all.
    PID: u64;
    /// The levels of the cgroup hierarchy on which [`CGROUP`] may be, one bit each; 0 for all cgroups.
    CGROUP_LEVELS: u64;
    /// The id of the cgroup that is traced, with those below it.
    CGROUP: u64;
    /// The network namespace that is traced; 0 for all.
    NETNS: u64;
    /// Not zero if only one address is traced, as the destination or as the backend.
    BY_ADDRESS: u64;
    /// The words of that address, IPv4 as v4-mapped.
    ADDRESS0: u64;
    ADDRESS1: u64;
    ADDRESS2: u64;
    ADDRESS3: u64;
    /// Its port in network byte order; 0 for all.
    PORT: u64;
    /// Not zero if only failures are reported, and what passes to a network of Services.
    FAILED_ONLY: u64;
    /// Not zero if the ends of connections are reported: of all, or of those that failed.
    ENDS: u64;
    /// Not zero if destinations in networks without Services are reported, too, and each datagram.
    ALL: u64;
}

const TCP_FIN_WAIT1: u32 = 4;
const TCP_CLOSE_WAIT: u32 = 8;

#[inline(always)]
pub(crate) fn passed<F: ReportingFamily>(ctx: &SockAddrContext, caller: &Caller<'_>) {
    if BY_PORT.load() != 0 {
        return;
    }
    let verdict = if caller.is_excluded() { EXCLUDED } else { PASSED };
    call::<F>(ctx, caller, verdict, NO_COUNTER, &SockAddr::UNSET);
}

#[inline(always)]
pub(crate) fn no_backends<F: ReportingFamily>(
    ctx: &SockAddrContext,
    caller: &Caller<'_>,
    port_counter: CounterIndex,
) {
    call::<F>(ctx, caller, NO_BACKENDS, port_counter, &SockAddr::UNSET);
}

/// The destination is about to be rewritten.
#[inline(always)]
pub(crate) fn redirected<F: ReportingFamily>(
    ctx: &SockAddrContext,
    caller: &Caller<'_>,
    selection: &Selection,
) {
    // The agent's probe has no counter.
    if selection.port_counter == NO_COUNTER {
        return;
    }
    if !caller.connects && selection.backend_counter == NO_COUNTER {
        if ALL.load() == 0 {
            return;
        }
        caller.notes.set(FURTHER_DATAGRAM);
    }
    call::<F>(ctx, caller, REDIRECTED, selection.port_counter, &selection.backend);
}

/// The packet path translates for this socket. The counter is one of the service port's.
#[inline(always)]
pub(crate) fn left_to_packets<F: ReportingFamily>(
    ctx: &SockAddrContext,
    caller: &Caller<'_>,
    counter: CounterIndex,
) {
    let port_counter = counter & !(COUNTERS_PER_PORT - 1);
    call::<F>(ctx, caller, LEFT_TO_PACKETS, port_counter, &SockAddr::UNSET);
}

#[inline(always)]
pub(crate) fn no_room<F: ReportingFamily>(ctx: &SockAddrContext, caller: &Caller<'_>, selection: &Selection) {
    call::<F>(ctx, caller, NO_ROOM, selection.port_counter, &SockAddr::UNSET);
}

/// What is known of a decision beside the context: the upper and the lower half of the backend's IP address; and the counter of
/// the service port, the notes, the backend's port and the verdict, see [`pack`]. With the context they fit into the registers
/// that outlast calls.
type Arguments = [u64; 3];

/// The last of the arguments. The notes are [`AFFINITY`](proxy_common::trace::AFFINITY) and its neighbors, which fit into a byte.
#[inline(always)]
const fn pack(counter: CounterIndex, notes: u32, port: Be16, verdict: u8) -> u64 {
    (counter as u64) << 32 | (notes as u8 as u64) << 24 | (port.raw() as u64) << 8 | verdict as u64
}

/// An address family of hooks that report. Its functions are not inlined: the verifier checks each once, as it does
/// `side::choose`, and the programs have no room left on their stack.
pub(crate) trait ReportingFamily: HookFamily {
    /// [`is_wanted`].
    fn is_wanted(ctx: &SockAddrContext, arguments: Arguments) -> bool;
    /// [`report`] of a connect.
    fn report_connect(ctx: &SockAddrContext, arguments: Arguments);
    /// [`report`] of a datagram.
    fn report_send(ctx: &SockAddrContext, arguments: Arguments);
}

macro_rules! reporting_family {
    ($family:ty, $is_wanted:ident, $connect:ident, $send:ident) => {
        impl ReportingFamily for $family {
            #[inline(always)]
            fn is_wanted(ctx: &SockAddrContext, [high, low, what]: Arguments) -> bool {
                $is_wanted(ctx.sock_addr, high, low, what) != 0
            }

            #[inline(always)]
            fn report_connect(ctx: &SockAddrContext, [high, low, what]: Arguments) {
                $connect(ctx.sock_addr, high, low, what);
            }

            #[inline(always)]
            fn report_send(ctx: &SockAddrContext, [high, low, what]: Arguments) {
                $send(ctx.sock_addr, high, low, what);
            }
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $is_wanted(ctx: *mut bpf_sock_addr, high: u64, low: u64, what: u64) -> u64 {
            is_wanted::<$family>(&SockAddrContext::new(ctx), [high, low, what]).into()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $connect(ctx: *mut bpf_sock_addr, high: u64, low: u64, what: u64) -> u64 {
            report::<$family, true>(&SockAddrContext::new(ctx), [high, low, what]);
            0
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $send(ctx: *mut bpf_sock_addr, high: u64, low: u64, what: u64) -> u64 {
            report::<$family, false>(&SockAddrContext::new(ctx), [high, low, what]);
            0
        }
    };
}

reporting_family!(V4, is_wanted4, report_connect4, report_send4);
reporting_family!(V6, is_wanted6, report_connect6, report_send6);

/// Reports a decision, if it is wanted. The destination is still that of the process.
#[inline(always)]
fn call<F: ReportingFamily>(
    ctx: &SockAddrContext,
    caller: &Caller<'_>,
    verdict: u8,
    port_counter: CounterIndex,
    backend: &SockAddr,
) {
    let is_connection = caller.connects && verdict == REDIRECTED;
    // What passes may be to a cluster IP that has no such port, which user space knows.
    if FAILED_ONLY.load() != 0 && !is_failure(verdict) && !is_connection && verdict != PASSED {
        return;
    }
    let [a, b, c, d] = backend.ip.raw().map(u64::from);
    let what = pack(port_counter, caller.notes.get(), backend.port, verdict);
    let arguments = [a << 32 | b, c << 32 | d, what];
    if !F::is_wanted(ctx, arguments) {
        return;
    }
    if caller.connects {
        F::report_connect(ctx, arguments);
    } else {
        // Not there, for whose calls the stack of `sendmsg6` has no room.
        log::decided(ctx, verdict);
        F::report_send(ctx, arguments);
    }
}

#[inline(always)]
const fn backend([high, low, what]: Arguments) -> SockAddr {
    let ip = V6::from_raw([(high >> 32) as u32, high as u32, (low >> 32) as u32, low as u32]);
    SockAddr::new(ip, Be16::from_raw((what >> 8) as u16))
}

/// Whether the filters let an event through. What needs the most of the arguments comes first.
#[inline(always)]
fn is_wanted<F: HookFamily>(ctx: &SockAddrContext, arguments: Arguments) -> bool {
    if BY_ADDRESS.load() != 0 && !is_address(&ctx::sock_addr::<F>(ctx)) && !is_address(&backend(arguments)) {
        return false;
    }
    let [.., what] = arguments;
    if BY_PORT.load() != 0 && PORTS.get_ptr((what >> 32) as u32).is_none() {
        return false;
    }
    let is_passed = matches!(what as u8, PASSED | EXCLUDED);
    let is_all = ALL.load() != 0 && FAILED_ONLY.load() == 0;
    is_process_wanted(ctx) && (is_all || !is_passed || is_in_service_network::<F>(ctx))
}

/// Writes an event.
#[inline(always)]
fn report<F: HookFamily, const CONNECTS: bool>(ctx: &SockAddrContext, arguments: Arguments) {
    let [.., what] = arguments;
    let verdict = what as u8;
    if CONNECTS {
        log::decided(ctx, verdict);
    }
    let fill = |event: *mut Event| {
        // What is in the arguments comes first, so that the stack need not keep it.
        // SAFETY: the verifier checks that there is room for an event.
        unsafe {
            (*event).backend = backend(arguments);
            (*event).port_counter = (what >> 32) as u32;
            (*event).notes = u32::from((what >> 24) as u8);
            (*event).verdict = verdict;
            (*event).call = if CONNECTS { CONNECT } else { SEND };
            (*event).end = 0;
            // Volatile, or the compiler would call a function to fill both, for whose frame the stack has no room.
            (&raw mut (*event).established).write_volatile(0);
            (&raw mut (*event).ended).write_volatile(0);
            (*event).protocol = ctx::protocol(ctx);
            (*event).destination = ctx::sock_addr::<F>(ctx);
            (*event).time = now();
            (*event).socket = ctx::cookie(ctx);
            (*event).netns = ctx::netns(ctx);
            (*event).cgroup = bpf_get_current_cgroup_id();
            (*event).pid = pid();
            bpf_get_current_comm((&raw mut (*event).process).cast(), 16);
        }
    };
    if CONNECTS && verdict == REDIRECTED && ENDS.load() != 0 {
        let Some(event) = open_entry(ctx::cookie(ctx)) else { return count_lost() };
        fill(event);
        if FAILED_ONLY.load() == 0 {
            output(event);
        }
        return;
    }
    let Some(mut entry) = EVENTS.reserve(0) else { return count_lost() };
    fill(MaybeUninit::as_mut_ptr(&mut entry));
    entry.submit(u64::from(BPF_RB_NO_WAKEUP));
}

#[inline(always)]
fn output(event: *mut Event) {
    // SAFETY: both are valid, and the size is that of an event.
    let result = unsafe {
        bpf_ringbuf_output(
            (&raw const EVENTS).cast_mut().cast(),
            event.cast(),
            size_of::<Event>() as u64,
            u64::from(BPF_RB_NO_WAKEUP),
        )
    };
    if result < 0 {
        count_lost();
    }
}

#[inline(always)]
fn count_lost() {
    if let Some(lost) = LOST.get_ptr_mut(0) {
        atomic::add(lost, 1);
    }
}

#[inline(always)]
fn open_entry(cookie: u64) -> Option<*mut Event> {
    // SAFETY: a slot of an array is never freed, and no program writes to this one.
    let blank = unsafe { &*BLANK.get_ptr(0)? };
    // If it fails, the look-up does.
    let _ = OPEN.insert(&cookie, blank, 0);
    OPEN.get_ptr_mut(&cookie)
}

#[inline(always)]
fn is_address(address: &SockAddr) -> bool {
    let [a, b, c, d] = address.ip.raw().map(u64::from);
    a == ADDRESS0.load()
        && b == ADDRESS1.load()
        && c == ADDRESS2.load()
        && d == ADDRESS3.load()
        && (PORT.load() == 0 || u64::from(address.port.raw()) == PORT.load())
}

/// Whether the process is in the cgroup that is traced, or in a descendant.
#[inline(always)]
fn is_in_cgroup() -> bool {
    let levels = CGROUP_LEVELS.load();
    for level in 0..MAX_LEVELS {
        // SAFETY: as in `exclusion`.
        if levels & (1 << level) != 0
            && unsafe { bpf_get_current_ancestor_cgroup_id(level as i32) } == CGROUP.load()
        {
            return true;
        }
    }
    false
}

impl LogContext for SockAddrContext {
    /// The filters know no more than the process yet. They are asked for each line, as the stack of `sendmsg6` has no room to
    /// keep the answer.
    #[inline(always)]
    fn logged_socket(&self) -> u64 {
        traced_socket(self.sock_addr)
    }
}

/// Not inlined, as [`ReportingFamily`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn traced_socket(ctx: *mut bpf_sock_addr) -> u64 {
    let ctx = &SockAddrContext::new(ctx);
    if is_process_wanted(ctx) { ctx::cookie(ctx) } else { 0 }
}

/// Whether the filters let through what this process does.
#[inline(always)]
fn is_process_wanted(ctx: &SockAddrContext) -> bool {
    (PID.load() == 0 || u64::from(pid()) == PID.load())
        && (NETNS.load() == 0 || ctx::netns(ctx) == NETNS.load())
        && (CGROUP_LEVELS.load() == 0 || is_in_cgroup())
}

/// Whether a Service has an address in the network of the destination.
#[inline(always)]
fn is_in_service_network<F: HookFamily>(ctx: &SockAddrContext) -> bool {
    let ip = F::address(ctx).mapped();
    let Some(side) = Side::<V6>::active() else { return false };
    match V4::from_mapped(ip) {
        Some(ip) => side.of_family::<V4>().may_be_frontend(ip),
        None => side.may_be_frontend(ip),
    }
}

#[inline(always)]
fn pid() -> u32 {
    // SAFETY: the helper takes nothing and touches nothing.
    unsafe { (bpf_get_current_pid_tgid() >> 32) as u32 }
}

#[inline(always)]
fn open_event(ctx: &impl EbpfContext) -> Option<&'static mut Event> {
    // SAFETY: the calls of one socket take turns; an evicted entry may be reused meanwhile, and a trace shows a mixture.
    OPEN.get_ptr_mut(ctx::cookie(ctx)).map(|it| unsafe { &mut *it })
}

/// The socket of a program that is called for no system call.
#[inline(always)]
fn open_socket(ctx: &impl EbpfContext) -> u64 {
    if ENDS.load() != 0 && open_event(ctx).is_some() { ctx::cookie(ctx) } else { 0 }
}

impl LogContext for SockContext {
    #[inline(always)]
    fn logged_socket(&self) -> u64 {
        open_socket(self)
    }
}

impl LogContext for SockOpsContext {
    #[inline(always)]
    fn logged_socket(&self) -> u64 {
        open_socket(self)
    }
}

/// Watches the connections whose end is reported.
#[inline(always)]
pub(crate) fn on_sock_ops(ctx: &SockOpsContext) {
    if ENDS.load() == 0 {
        return;
    }
    match ctx::operation(ctx) {
        BPF_SOCK_OPS_TCP_CONNECT_CB => {
            if open_event(ctx).is_some() {
                let calls = ctx.cb_flags().cast_signed() | BPF_SOCK_OPS_STATE_CB_FLAG.cast_signed();
                let _ = ctx.set_cb_flags(calls);
            }
        }
        BPF_SOCK_OPS_STATE_CB => {
            let Some(event) = open_event(ctx) else { return };
            if event.end != 0 {
                return;
            }
            let end = match (ctx::tcp_state(ctx), ctx::next_tcp_state(ctx)) {
                (TCP_SYN_SENT, TCP_ESTABLISHED) => {
                    event.established = now();
                    return;
                }
                (TCP_SYN_SENT, TCP_CLOSE) if ctx::has_received(ctx) => REFUSED,
                (TCP_SYN_SENT, TCP_CLOSE) => NO_ANSWER,
                (TCP_ESTABLISHED, TCP_FIN_WAIT1) => CLOSED,
                (TCP_ESTABLISHED, TCP_CLOSE_WAIT) => CLOSED_BY_BACKEND,
                (TCP_ESTABLISHED, TCP_CLOSE) => RESET,
                _ => return,
            };
            event.end = end;
            event.ended = now();
        }
        _ => {}
    }
}

/// A socket is released: reports the end of its connection.
#[inline(always)]
pub(crate) fn released(ctx: &SockContext) {
    if ENDS.load() == 0 {
        return;
    }
    let Some(event) = open_event(ctx) else { return };
    log::closed(ctx);
    if event.end == 0 {
        let is_unanswered = event.protocol == TCP && ctx::released_state(ctx) == TCP_SYN_SENT;
        event.end = if is_unanswered { GIVEN_UP } else { CLOSED };
        event.ended = now();
    }
    if FAILED_ONLY.load() == 0 || is_failed_end(event.end) {
        output(event);
    }
    let _ = OPEN.remove(ctx::cookie(ctx));
}
