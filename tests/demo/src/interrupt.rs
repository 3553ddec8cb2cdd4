//! Ctrl-C and SIGTERM: the first ends the demo and removes the sandbox, the second ends it at once.

use std::{
    io::ErrorKind,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Error, Result, ensure};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

static REQUESTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// The exit code of a demo that was interrupted, as a shell reports it.
pub(crate) const EXIT_CODE: u8 = 130;

pub(crate) fn watch() -> Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register_conditional_shutdown(signal, EXIT_CODE.into(), Arc::clone(&REQUESTED))?;
        flag::register(signal, Arc::clone(&REQUESTED))?;
    }
    Ok(())
}

pub(crate) fn is_requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Marks an error as a consequence of an interruption, if there was one, by an [`ErrorKind`].
pub(crate) fn mark(error: Error) -> Error {
    if is_requested() { error.context(ErrorKind::Interrupted) } else { error }
}

pub(crate) fn check() -> Result<()> {
    ensure!(!is_requested(), "interrupted");
    Ok(())
}

/// Sleeps; fails as soon as the demo is interrupted.
pub(crate) fn sleep(duration: Duration) -> Result<()> {
    let end = Instant::now() + duration;
    while Instant::now() < end {
        check()?;
        thread::sleep(Duration::from_millis(10).min(end.saturating_duration_since(Instant::now())));
    }
    check()
}
