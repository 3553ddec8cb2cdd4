//! libFuzzer chooses requests for pages.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::pages::target(data));
