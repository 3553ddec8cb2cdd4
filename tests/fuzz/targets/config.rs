//! libFuzzer chooses KubeProxyConfigurations.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::config::target(data));
