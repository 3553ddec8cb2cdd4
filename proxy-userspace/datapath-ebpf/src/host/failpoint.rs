//! Named steps at which a test kills the process. Without the feature `fault-points` they compile to nothing.

use std::{
    env,
    sync::atomic::{AtomicU32, Ordering},
};

/// The environment variable that names the step: `NAME`, or `NAME:N` for the N-th time it is reached.
const VARIABLE: &str = "KUBE_PROXY_EBPF_FAULT";

/// Whether a test enabled this fault.
#[inline(always)]
pub(crate) fn is_enabled(name: &str) -> bool {
    cfg!(feature = "fault-points") && env::var(VARIABLE).is_ok_and(|it| it == name)
}

/// Kills the process with SIGKILL if a test enabled this step.
#[inline(always)]
pub(crate) fn point(name: &str) {
    static REACHED: AtomicU32 = AtomicU32::new(0);

    if cfg!(feature = "fault-points")
        && let Ok(enabled) = env::var(VARIABLE)
    {
        let (step, times) = enabled.split_once(':').unwrap_or((&enabled, "1"));
        if step == name && times.parse() == Ok(REACHED.fetch_add(1, Ordering::Relaxed) + 1) {
            let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::SIGKILL);
        }
    }
}
