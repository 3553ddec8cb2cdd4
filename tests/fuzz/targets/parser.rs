//! libFuzzer chooses manifests.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::parser::target(data));
