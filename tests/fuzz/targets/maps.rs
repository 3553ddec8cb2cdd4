//! libFuzzer chooses what pinned maps contain.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::maps::target(data));
