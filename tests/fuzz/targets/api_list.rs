//! libFuzzer chooses lists of an API server.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::api_list::target(data));
