//! Ctrl-C, as something that can be asked for. The one rule: the first ends the demo in order, the second at once.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// The demo was asked to end.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl Interrupted {
    /// As a shell reports it.
    pub(crate) const EXIT_CODE: u8 = 130;
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted; the sandbox is taken down")
    }
}

impl std::error::Error for Interrupted {}

/// From now on a signal to end is remembered instead of obeyed.
pub(crate) fn watch() -> Result<()> {
    let asked = ASKED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register_conditional_shutdown(signal, Interrupted::EXIT_CODE.into(), Arc::clone(asked))?;
        flag::register(signal, Arc::clone(asked))?;
    }
    Ok(())
}

/// Fails if the demo was asked to end.
pub(crate) fn check() -> Result<()> {
    if ASKED.get().is_some_and(|it| it.load(Ordering::Relaxed)) {
        return Err(Interrupted.into());
    }
    Ok(())
}

/// Sleeps, and fails as soon as the demo is asked to end.
pub(crate) fn sleep(duration: Duration) -> Result<()> {
    let end = Instant::now() + duration;
    while Instant::now() < end {
        check()?;
        thread::sleep(Duration::from_millis(10).min(end.saturating_duration_since(Instant::now())));
    }
    check()
}
