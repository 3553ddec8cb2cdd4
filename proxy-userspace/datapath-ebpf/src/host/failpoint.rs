//! Named steps at which a test kills the process. Without the feature `fault-points` they compile to nothing.

/// The environment variable that names the step: `NAME`, or `NAME:N` for the N-th time it is reached.
#[cfg(feature = "fault-points")]
const VARIABLE: &str = "KUBE_PROXY_EBPF_FAULT";

/// Whether a test enabled this fault.
#[cfg(feature = "fault-points")]
pub(crate) fn is_enabled(name: &str) -> bool {
    std::env::var(VARIABLE).is_ok_and(|it| it == name)
}

/// Always false.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub(crate) fn is_enabled(_: &str) -> bool {
    false
}

/// Kills the process with SIGKILL if a test enabled this step.
#[cfg(feature = "fault-points")]
pub(crate) fn point(name: &str) {
    use std::sync::atomic::{AtomicU32, Ordering};

    static REACHED: AtomicU32 = AtomicU32::new(0);

    let Ok(enabled) = std::env::var(VARIABLE) else { return };
    let (step, times) = enabled.split_once(':').unwrap_or((&enabled, "1"));
    if step == name && times.parse() == Ok(REACHED.fetch_add(1, Ordering::Relaxed) + 1) {
        let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::SIGKILL);
    }
}

/// Nothing.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub(crate) fn point(_: &str) {}
