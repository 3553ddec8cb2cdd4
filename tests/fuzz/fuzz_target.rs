//! libFuzzer chooses the input of the target that the variable `FUZZ_TARGET` names.

#![no_main]

use std::{env, process, sync::LazyLock};

use fuzz::targets::TARGETS;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = env::var("FUZZ_TARGET").unwrap_or_default();
    let Some((_, target)) = TARGETS.into_iter().find(|(it, _)| *it == name) else {
        eprintln!("error: FUZZ_TARGET={name:?} names no target");
        process::exit(1);
    };
    target
});

libfuzzer_sys::fuzz_target!(init: LazyLock::force(&TARGET), |data: &[u8]| (*TARGET)(data));
