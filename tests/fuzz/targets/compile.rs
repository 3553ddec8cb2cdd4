//! libFuzzer chooses histories of a cluster, for both datapaths.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::compile::target(data));
