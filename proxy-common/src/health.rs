//! Passive health: which endpoints fail for which clients.
//!
//! A *client* is a network namespace. An endpoint to which several connections of a client in a row failed is *ejected* for
//! that client: its next connections avoid the endpoint for a time, which doubles from ejection to ejection. Then one
//! connection tries, and a success makes everything good. No client has a say in the connections of another one.
//!
//! The layout outlasts upgrades (see [`crate::HEALTH_VERSION`]), and so do the records: an endpoint is identified by the
//! counter of its connections.

use crate::{
    counters::{COUNTERS_PER_CHUNK, CounterIndex, MAX_CHUNKS},
    random::mix,
    tables::{HealthPolicy, MAX_FAILURES},
};

/// A client: a hash of the cookie of its network namespace.
pub type Client = u32;

#[inline(always)]
pub const fn client(netns: u64) -> Client {
    mix(netns, 0)
}

/// The key of a record.
pub type FailureKey = u64;

#[inline(always)]
pub const fn key(client: Client, backend: CounterIndex) -> FailureKey {
    (client as u64) << 32 | backend as u64
}

pub const fn key_parts(key: FailureKey) -> (Client, CounterIndex) {
    ((key >> 32) as Client, key as CounterIndex)
}

/// How many records there may be; the least recently used one is evicted first.
pub const MAX_RECORDS: u32 = 16_384;

/// How long others wait for the one connection that tries an endpoint, in nanoseconds: unanswered, it fails after one
/// second.
pub const TRIAL_TIME: u64 = 3_000_000_000;

/// How long a connection must have been unanswered to count as failed when its program gives it up, in microseconds. Happy eyeballs
/// give up the slower family earlier: 250 to 300 ms after its first segment (RFC 8305), and as long as the other one takes.
pub const MIN_GIVEN_UP_TIME: u64 = 400_000;

/// The connections of a client to a backend that failed since the last one that succeeded. There is no record without a
/// failure. Times are in nanoseconds of the monotonic clock.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct FailureRecord {
    /// Until when other backends are preferred; 0 if it was not ejected yet.
    pub until: u64,
    pub last: u64,
    pub timeouts: u16,
    pub refusals: u16,
    pub ejections: u16,
    /// 1 if one connection is trying, else 0.
    pub is_on_trial: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It was not answered in time.
    Timeout,
    Refusal,
}

impl Cause {
    /// The word in which ejections for it are counted.
    pub const fn word(self) -> u32 {
        match self {
            Self::Timeout => TIMEOUTS,
            Self::Refusal => REFUSALS,
        }
    }
}

impl FailureRecord {
    #[inline(always)]
    pub const fn failures(&self) -> u32 {
        self.timeouts as u32 + self.refusals as u32
    }

    /// Counts a failure; returns whether the backend is ejected for it. `failures` is the number that is needed, `time` how
    /// long a first ejection lasts, and `max_time` the longest one.
    ///
    /// Connections that began before an ejection neither prolong it nor count.
    #[inline(always)]
    pub const fn fail(&mut self, now: u64, cause: Cause, failures: u32, time: u64, max_time: u64) -> bool {
        if now < self.until && self.is_on_trial == 0 {
            return false;
        }
        self.last = now;
        match cause {
            Cause::Timeout => self.timeouts = self.timeouts.saturating_add(1),
            Cause::Refusal => self.refusals = self.refusals.saturating_add(1),
        }
        if self.failures() < failures && self.is_on_trial == 0 {
            return false;
        }
        // 2^17 seconds are more than the longest maximum, a day; and 2^17 hours fit.
        let doublings = if self.ejections < 17 { self.ejections as u32 } else { 17 };
        let time = time << doublings;
        self.until = now + if time < max_time { time } else { max_time };
        self.ejections = self.ejections.saturating_add(1);
        self.is_on_trial = 0;
        true
    }

    /// Makes others wait for a connection that tries the backend, if that was ejected and its time is out.
    #[inline(always)]
    pub const fn try_again(&mut self, now: u64) {
        if self.until != 0 && self.until <= now {
            self.until = now + TRIAL_TIME;
            self.is_on_trial = 1;
        }
    }
}

/// What a slot reports of its connection: to which backend it is, how many failures eject that, and whether the connection
/// is counted as open.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Watch(u32);

/// How many bits the index of a counter has.
const COUNTER_BITS: u32 = (MAX_CHUNKS * COUNTERS_PER_CHUNK as u32).trailing_zeros();
/// The bit of a connection that is counted as open.
const COUNTED: u32 = 1 << 31;
/// The bits between it and the counter: how many failures are needed, or [`FAILED`].
const FAILURES: u32 = COUNTED - (1 << COUNTER_BITS);
/// The connection has failed already.
const FAILED: u32 = FAILURES;

impl Watch {
    pub const NONE: Self = Self(0);
    /// Not a connection, but the datagrams of an unconnected socket.
    pub const UNCONNECTED: Self = Self(!COUNTED);

    /// A connection to the backend with this counter. It is not watched if the policy ejects none.
    #[inline(always)]
    pub const fn new(backend: CounterIndex, policy: HealthPolicy, is_counted: bool) -> Self {
        // No branch, of which the verifier would follow both ways to the end: without a counter, no record is ever read.
        Self((is_counted as u32) << 31 | (policy.failures as u32) << COUNTER_BITS | backend)
    }

    #[inline(always)]
    pub const fn bits(self) -> u32 {
        self.0
    }

    #[inline(always)]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    #[inline(always)]
    pub const fn backend(self) -> CounterIndex {
        self.0 & ((1 << COUNTER_BITS) - 1)
    }

    /// Whether its outcome is not known yet, or was a failure that a later answer makes good.
    #[inline(always)]
    pub const fn is_pending(self) -> bool {
        self.0 & FAILURES != 0
    }

    /// How many failures eject the backend; 0 if none does, or this connection has failed already.
    #[inline(always)]
    pub const fn failures(self) -> u32 {
        if self.0 & FAILURES == FAILED { 0 } else { (self.0 & FAILURES) >> COUNTER_BITS }
    }

    #[inline(always)]
    pub const fn is_counted(self) -> bool {
        self.0 & COUNTED != 0
    }

    /// The watch after a failure of its connection.
    #[inline(always)]
    #[must_use]
    pub const fn failed(self) -> Self {
        Self(self.0 | FAILED)
    }

    /// The watch once the outcome of its connection is known.
    #[inline(always)]
    #[must_use]
    pub const fn settled(self) -> Self {
        Self(self.0 & !FAILURES)
    }
}

/// What the programs keep beside the records, by position: not zero if there may be a record. User space resets it.
pub const HAS_RECORDS: u32 = 0;
/// Ejections because a connection was not answered in time.
pub const TIMEOUTS: u32 = 1;
/// Ejections because a connection was refused.
pub const REFUSALS: u32 = 2;
/// Always 0.
pub const ZERO: u32 = 3;
pub const WORDS: u32 = 4;

const _: () = assert!(size_of::<FailureRecord>() == 24);
const _: () = assert!((MAX_FAILURES as u32) << COUNTER_BITS < FAILED);
const _: () = assert!((MAX_CHUNKS * COUNTERS_PER_CHUNK as u32).is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::NO_COUNTER;

    const SECOND: u64 = 1_000_000_000;

    fn fail(record: &mut FailureRecord, at: u64) -> bool {
        record.fail(at, Cause::Timeout, 3, 5 * SECOND, 60 * SECOND)
    }

    #[test]
    fn failures_of_both_causes_count_together_and_are_told_apart() {
        let mut record = FailureRecord::default();
        let mut fail = |cause| record.fail(SECOND, cause, 3, 5 * SECOND, 60 * SECOND);
        assert!(!fail(Cause::Timeout) && !fail(Cause::Refusal) && fail(Cause::Refusal));
        assert_eq!((record.timeouts, record.refusals, record.failures()), (1, 2, 3));
        let mut record = FailureRecord { timeouts: u16::MAX, refusals: u16::MAX, ..FailureRecord::default() };
        assert!(record.fail(SECOND, Cause::Refusal, 3, 5 * SECOND, 60 * SECOND));
        assert_eq!(record.failures(), 2 * u32::from(u16::MAX));
    }

    #[test]
    fn a_backend_is_ejected_by_failures_in_a_row_for_doubled_times() {
        let mut record = FailureRecord::default();
        assert!(!fail(&mut record, SECOND) && !fail(&mut record, SECOND) && record.until == 0);
        let mut now = SECOND;
        for time in [5, 10, 20, 40, 60, 60] {
            assert!(fail(&mut record, now));
            assert_eq!(record.until, now + time * SECOND);
            // Those that began before the ejection, to its last nanosecond.
            assert!(!fail(&mut record, now + 1) && !fail(&mut record, now + time * SECOND - 1));
            now = record.until;
            record.try_again(now - 1);
            assert_eq!(record.is_on_trial, 0);
            record.try_again(now);
            assert_eq!((record.is_on_trial, record.until), (1, now + TRIAL_TIME), "only one tries");
            now += SECOND;
        }
        // One that tried is enough, however many are needed otherwise.
        record.try_again(now + 60 * SECOND);
        assert!(record.fail(now + 61 * SECOND, Cause::Timeout, 100, 5 * SECOND, 60 * SECOND));
        now = record.until;
        record.ejections = u16::MAX;
        assert!(fail(&mut record, now) && record.until == now + 60 * SECOND);
    }

    #[test]
    fn a_watch_is_a_counter_and_a_number_of_failures() {
        let policy = HealthPolicy { failures: MAX_FAILURES, max_ejected: 100 };
        let last = MAX_CHUNKS * COUNTERS_PER_CHUNK as u32 - 1;
        for backend in [0, 7, last] {
            for is_counted in [false, true] {
                let new = Watch::new(backend, policy, is_counted);
                for (watch, failures, is_pending) in
                    [(new, MAX_FAILURES, true), (new.failed(), 0, true), (new.settled(), 0, false)]
                {
                    assert_eq!((watch.backend(), watch.failures()), (backend, failures.into()));
                    assert_eq!((watch.is_pending(), watch.is_counted()), (is_pending, is_counted));
                    assert_eq!(Watch::from_bits(watch.bits()), watch);
                }
                assert_ne!(new, Watch::UNCONNECTED);
                assert_eq!(new.failed().settled(), new.settled());
            }
        }
        assert_eq!(Watch::from_bits(Watch::UNCONNECTED.bits()), Watch::UNCONNECTED);
        assert_eq!((Watch::from_bits(0), Watch::NONE.bits()), (Watch::NONE, 0), "an empty slot has none");
        assert!(!Watch::UNCONNECTED.is_counted());
        let none = Watch::new(NO_COUNTER, policy, false);
        assert_ne!(none, Watch::UNCONNECTED);
        assert!(none.backend() > COUNTERS_PER_CHUNK as u32, "no record of another one");
        assert!(!Watch::new(7, HealthPolicy::default(), true).is_pending());
    }

    #[test]
    fn a_key_names_client_and_backend() {
        assert_eq!(key_parts(key(client(5), 7)), (client(5), 7));
    }
}
