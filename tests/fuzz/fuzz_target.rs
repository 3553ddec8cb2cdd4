//! libFuzzer chooses the input of the target that the variable `FUZZ_TARGET` names.

#![no_main]

use std::{env, sync::LazyLock};

use fuzz::targets::TARGETS;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = env::var("FUZZ_TARGET").unwrap_or_default();
    let target = TARGETS.into_iter().find(|(it, _)| *it == name);
    target.unwrap_or_else(|| panic!("FUZZ_TARGET={name:?} names no target")).1
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| (*TARGET)(data));
