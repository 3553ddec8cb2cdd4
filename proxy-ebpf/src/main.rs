//! The kernel side: one file per hook, every map in [`maps`], every raw access to a socket in [`ctx`].
//!
//! Invariant: if anything fails inside a program, the system call proceeds unchanged ([`ctx::PASS`]).
//! The decision logic is in `proxy_common`; here is only the kernel around it.
//! The object of a trace lacks the programs that forward packets: it replaces those of sockets only, and reports packets.

#![no_std]
#![no_main]
// `atomic` and `sock_owner` need instructions that the compiler does not generate.
#![feature(asm_experimental_arch)]
#![expect(
    unsafe_code,
    reason = "helpers and socket contexts are raw pointers here; the verifier checks each access"
)]

mod atomic;
mod backend_states;
mod bind;
mod caller;
mod config;
mod connect;
mod counters;
mod ctx;
mod exclusion;
#[cfg_attr(
    feature = "trace",
    expect(dead_code, reason = "only the programs that forward packets use all of it")
)]
mod forward_tables;
mod getpeername;
mod health;
#[cfg(not(feature = "trace"))]
mod ingress;
#[cfg(not(feature = "trace"))]
mod ingress_xdp;
mod kernel_sock;
#[cfg_attr(not(feature = "log"), expect(dead_code, reason = "only `logged_side` says some of its lines"))]
mod log;
#[cfg(feature = "log")]
mod log_support;
#[cfg(feature = "log")]
mod logged_side;
mod maps;
mod notes;
mod origin;
mod overflow;
#[cfg_attr(
    feature = "trace",
    expect(dead_code, reason = "only the programs that forward packets use all of it")
)]
mod packet_family;
mod packet_path;
mod recvmsg;
mod release;
mod senders;
mod sendmsg;
mod side;
#[cfg_attr(
    feature = "trace",
    expect(dead_code, reason = "only the programs that forward packets use all of it")
)]
mod skb;
mod slot;
mod sock_nat;
mod sock_ops;
mod sock_owner;
#[cfg_attr(not(feature = "trace"), path = "untraced.rs")]
mod trace;
#[cfg(feature = "trace")]
mod trace_ingress;
mod udp_nat;

/// Lets the programs use the helpers that the kernel reserves for GPL-compatible ones.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Unreachable: the verifier rejects a program that could loop forever.
    loop {}
}
