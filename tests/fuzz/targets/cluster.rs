//! libFuzzer chooses what another brain says of a cluster.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::cluster::target(data));
