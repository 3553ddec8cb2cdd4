//! What has happened in a simulation, and a hash of it with every byte that was sent.

use std::{
    fmt::Display,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    process::exit,
    sync::LazyLock,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

#[derive(Default)]
struct History {
    begin: Option<Instant>,
    lines: Vec<String>,
    hash: DefaultHasher,
}

static HISTORY: LazyLock<Mutex<History>> = LazyLock::new(Mutex::default);

/// The time since the beginning; within a runtime.
pub(crate) fn now() -> Duration {
    HISTORY.lock().begin.get_or_insert_with(Instant::now).elapsed()
}

/// Records what happens; within a runtime.
pub(crate) fn note(what: impl Display) {
    let line = format!("{:>10.3} s  {what}", now().as_secs_f64());
    tracing::info!("{line}");
    let mut history = HISTORY.lock();
    line.hash(&mut history.hash);
    history.lines.push(line);
}

/// Records bytes that arrive, in the hash only.
pub(crate) fn data(link: u64, bytes: &[u8]) {
    let now = now();
    (now, link, bytes).hash(&mut HISTORY.lock().hash);
}

pub(crate) fn hash() -> u64 {
    HISTORY.lock().hash.finish()
}

pub(crate) fn print() {
    for line in &HISTORY.lock().lines {
        println!("{line}");
    }
}

/// Prints what has happened and ends the process: the simulation has found a defect.
pub(crate) fn fail(defect: impl Display) -> ! {
    print();
    println!("\nDEFECT: {defect}");
    exit(1)
}
