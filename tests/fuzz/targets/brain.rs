//! libFuzzer chooses histories of a cluster.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::brain::target(data));
