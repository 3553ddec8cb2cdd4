//! The kernel side: one file per hook, every map in [`maps`], every raw access to a socket in [`ctx`].
//!
//! The one rule: whatever goes wrong inside a program, the system call goes on untouched ([`PASS`]).
//! What is decided, and from what, stands in `proxy_common`; here is only the kernel around it.

#![no_std]
#![no_main]
// `atomic` needs one instruction that the compiler has no other word for.
#![feature(asm_experimental_arch)]
#![expect(
    unsafe_code,
    reason = "helpers and socket contexts are raw pointers here; the verifier checks each access"
)]

mod atomic;
mod bind;
mod canary;
mod connect;
mod counters;
mod ctx;
mod datagrams;
mod getpeername;
mod maps;
mod memory;
mod owner;
mod process;
mod recvmsg;
mod release;
mod scope;
mod sendmsg;

/// The system call goes on.
const PASS: i32 = 1;
/// The system call fails, with the errno given to `bpf_set_retval`, or else EPERM.
const DENY: i32 = 0;

/// Lets the kernel use the helpers that it keeps for GPL-compatible programs.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier refuses a program that could come here.
    loop {}
}
