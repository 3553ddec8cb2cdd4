//! libFuzzer chooses change sets of a brain.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::change_sets::target(data));
