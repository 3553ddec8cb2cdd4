//! Named steps at which a test lets the process die. Without the feature `fault-points` they are nothing at all.

/// The environment variable that names the step: `NAME`, or `NAME:N` for the N-th time it is reached.
#[cfg(feature = "fault-points")]
const VARIABLE: &str = "KUBE_PROXY_EBPF_FAULT";

/// Whether a test asked for this.
#[cfg(feature = "fault-points")]
pub(crate) fn is_wanted(name: &str) -> bool {
    std::env::var(VARIABLE).is_ok_and(|it| it == name)
}

/// It cannot be asked for.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub(crate) fn is_wanted(_: &str) -> bool {
    false
}

/// The process dies here with SIGKILL if a test asked for it.
#[cfg(feature = "fault-points")]
pub(crate) fn point(name: &str) {
    use std::sync::atomic::{AtomicU32, Ordering};

    static REACHED: AtomicU32 = AtomicU32::new(0);

    let Ok(wanted) = std::env::var(VARIABLE) else { return };
    let (step, times) = wanted.split_once(':').unwrap_or((&wanted, "1"));
    if step == name && times.parse() == Ok(REACHED.fetch_add(1, Ordering::Relaxed) + 1) {
        let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::SIGKILL);
    }
}

/// Nothing.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub(crate) fn point(_: &str) {}
