//! Where chance and time come from in this process: from the seed.
//!
//! The standard library asks the system for randomness (the order of hash maps, the numbers of instances, the branches of
//! `select!`) and for the time by two functions that a program may define itself. With these, nothing is left that differs
//! between two runs of a seed; timers are those of a paused tokio runtime.

use std::{
    mem::MaybeUninit,
    sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    time::Duration,
};

use rustix::time::{ClockId, Timespec};

static RANDOM: AtomicU64 = AtomicU64::new(0);
static IS_SIMULATED: AtomicBool = AtomicBool::new(false);
/// The wall clock, in seconds since 1970.
static WALL_CLOCK: AtomicI64 = AtomicI64::new(1_800_000_000);

const CLOCK_REALTIME: i32 = ClockId::Realtime as i32;

/// From now on, chance and time are those of a seed. To be called before the thread that simulates begins.
pub(crate) fn begin(seed: u64) {
    RANDOM.store(seed, Ordering::Relaxed);
    IS_SIMULATED.store(true, Ordering::Relaxed);
}

pub(crate) fn set_wall_clock(forward: bool, by: Duration) {
    let seconds = i64::try_from(by.as_secs()).unwrap_or(i64::MAX);
    WALL_CLOCK.fetch_add(if forward { seconds } else { -seconds }, Ordering::Relaxed);
}

/// The next random number (SplitMix64).
fn next() -> u64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut it = RANDOM.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
    it = (it ^ (it >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    it = (it ^ (it >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    it ^ (it >> 31)
}

/// getrandom(2), which may fill less than all: one byte.
#[expect(unsafe_code, reason = "takes the place of libc's function; callers never ask for no byte at all")]
#[unsafe(no_mangle)]
extern "C" fn getrandom(buffer: &mut MaybeUninit<u8>, _length: usize, _flags: u32) -> isize {
    buffer.write(next().to_le_bytes()[0]);
    1
}

/// clock_gettime(2). While time is simulated, only the wall clock moves, when it is set.
#[expect(unsafe_code, reason = "takes the place of libc's function")]
#[unsafe(no_mangle)]
extern "C" fn clock_gettime(clock: i32, time: &mut MaybeUninit<Timespec>) -> i32 {
    time.write(match (IS_SIMULATED.load(Ordering::Relaxed), clock) {
        (true, CLOCK_REALTIME) => Timespec { tv_sec: WALL_CLOCK.load(Ordering::Relaxed), tv_nsec: 0 },
        (true, _) => Timespec { tv_sec: 1_000_000, tv_nsec: 0 },
        (false, CLOCK_REALTIME) => rustix::time::clock_gettime(ClockId::Realtime),
        (false, _) => rustix::time::clock_gettime(ClockId::Monotonic),
    });
    0
}
