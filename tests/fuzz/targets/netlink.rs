//! libFuzzer chooses datagrams of the kernel.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::netlink::target(data));
