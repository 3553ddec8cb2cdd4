//! How fast this machine is now, so that limits of time are those of a hang and not of a busy or small machine.

use std::{
    collections::hash_map::DefaultHasher,
    hash::Hasher as _,
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

/// How long the work takes on a machine of ordinary speed that does nothing else (x86-64, 3 GHz, a debug build).
const REFERENCE: Duration = Duration::from_millis(100);
/// How many words are hashed.
const WORDS: u64 = 1_000_000;
/// A machine that is slower than this hangs.
const MAX_FACTOR: f64 = 20.0;

/// By how much limits of time are multiplied: how much longer some work takes here, at least 1.
pub(super) fn factor(processors: usize) -> f64 {
    let work = || {
        (0..WORDS).fold(DefaultHasher::new(), |mut hasher, it| {
            hasher.write_u64(it);
            hasher
        })
    };
    let begin = Instant::now();
    thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| black_box(work().finish()));
        }
    });
    (begin.elapsed().as_secs_f64() / REFERENCE.as_secs_f64()).clamp(1.0, MAX_FACTOR)
}
