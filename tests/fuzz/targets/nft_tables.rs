//! libFuzzer chooses what nftables contain.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::nft_tables::target(data));
