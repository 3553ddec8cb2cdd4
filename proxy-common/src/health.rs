//! Passive health: which endpoints fail for which clients.
//!
//! A *client* is a network namespace. An endpoint to which several connections of a client in a row failed is *ejected* for
//! that client: its next connections avoid the endpoint for a time, which doubles from ejection to ejection. Then one
//! connection tries, and a success makes everything good. No client has a say in the connections of another one.
//!
//! The layout outlasts upgrades (see [`crate::HEALTH_VERSION`]), and so do the records: an endpoint is identified by the
//! counter of its connections.

#[cfg(feature = "user")]
use bytemuck::{Pod, Zeroable};

use crate::{
    counters::{COUNTERS_PER_CHUNK, CounterIndex, MAX_CHUNKS, NO_COUNTER},
    random::{mix, scale},
    tables::{Frontend, HealthPolicy, MAX_FAILURES},
};

/// A client: a hash of the cookie of its network namespace.
pub type Client = u32;

/// The client of a network namespace.
#[inline(always)]
pub const fn client(netns: u64) -> Client {
    mix(netns, 0)
}

/// The key of a record.
pub type FailureKey = u64;

/// The key of a client's record of a backend.
#[inline(always)]
pub const fn key(client: Client, backend: CounterIndex) -> FailureKey {
    (client as u64) << 32 | backend as u64
}

/// The client and the backend of a key.
pub const fn key_parts(key: FailureKey) -> (Client, CounterIndex) {
    ((key >> 32) as Client, key as CounterIndex)
}

/// How many records there may be; the least recently used one is evicted first.
pub const MAX_RECORDS: u32 = 16_384;

/// How long others wait for the one connection that tries an endpoint, in nanoseconds: unanswered, it fails after one
/// second.
pub const TRIAL_TIME: u64 = 3_000_000_000;

/// The connections of a client to a backend that failed since the last one that succeeded. There is no record without a
/// failure. Times are in nanoseconds of the monotonic clock.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct FailureRecord {
    /// Until when other backends are preferred; 0 if it was not ejected yet.
    pub until: u64,
    /// The last failure.
    pub last: u64,
    /// How many connections failed.
    pub failures: u32,
    /// How often it was ejected.
    pub ejections: u16,
    /// 1 if one connection is trying, else 0.
    pub is_on_trial: u16,
}

impl FailureRecord {
    /// Counts a failure; returns whether the backend is ejected for it. `failures` is the number that is needed, `time` how
    /// long a first ejection lasts, and `max_time` the longest one.
    ///
    /// Connections that began before an ejection neither prolong it nor count.
    #[inline(always)]
    pub const fn fail(&mut self, now: u64, failures: u32, time: u64, max_time: u64) -> bool {
        if now < self.until && self.is_on_trial == 0 {
            return false;
        }
        self.last = now;
        self.failures = self.failures.saturating_add(1);
        if self.failures < failures && self.is_on_trial == 0 {
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

/// A choice among the backends of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The position of the first one.
    pub offset: u32,
    /// How many there are.
    pub count: u32,
    /// How many percent of them are avoided at most.
    pub max_ejected: u8,
    /// The client.
    pub client: Client,
    /// Random bits.
    pub random: u32,
}

impl Choice {
    /// A choice among those of a frontend.
    #[inline(always)]
    pub const fn of(frontend: &Frontend, client: Client, random: u32) -> Self {
        let &Frontend { backend_offset: offset, backend_count: count, health, .. } = frontend;
        Self { offset, count, max_ejected: health.max_ejected, client, random }
    }
}

/// The records, as a choice sees them.
pub trait FailureRecords {
    /// The monotonic clock in nanoseconds.
    fn now(&self) -> u64;
    /// Until when a client avoids a backend, in nanoseconds of that clock; 0 if it does not.
    fn ejected_until(&self, client: Client, backend: CounterIndex) -> u64;
    /// A connection goes to this backend, see [`FailureRecord::try_again`].
    fn try_again(&self, client: Client, backend: CounterIndex, now: u64);
    /// 0. The verifier does not know, and follows no value that it is added to.
    fn zero(&self) -> u32;
}

/// Stands for no position.
pub const NO_POSITION: u32 = u32::MAX;

/// How many backends are considered when one is ejected.
const SAMPLE_BITS: u32 = 4;

/// The position of a random backend that is not ejected for the client, if there is one.
///
/// `first` is the counter of the backend that is preferred, or [`NO_COUNTER`] for a random one. The result is
/// [`NO_POSITION`] if that was given, and is to be used.
///
/// Instead of an ejected backend another one is selected, out of the whole set, or of a sample that is spread evenly over a
/// large one: those that fail together are often neighbours, being on one node. No more than the policy allows, and never
/// all, count as ejected.
#[inline(always)]
pub fn healthy_position(
    counter_at: impl Fn(u32) -> Option<CounterIndex>,
    records: &impl FailureRecords,
    choice: Choice,
    first: CounterIndex,
) -> u32 {
    let Choice { offset, count, max_ejected, client, random } = choice;
    let mut at = scale(random, count);
    let (mut position, mut counter) = (NO_POSITION, first);
    if first == NO_COUNTER {
        position = offset + at;
        counter = counter_at(position).unwrap_or(NO_COUNTER);
    }
    let until = records.ejected_until(client, counter);
    if until == 0 {
        return position;
    }
    let now = records.now();
    let size = count.min(1 << SAMPLE_BITS);
    let allowed = size * u32::from(max_ejected);
    if until > now && allowed >= 100 {
        // Rounded up, so that the sample goes round once. A few come twice.
        let stride = (count + (1 << SAMPLE_BITS) - 1) >> SAMPLE_BITS;
        let zero = records.zero();
        let (mut random, mut good, mut ejected) = (random, zero, zero);
        for number in 0..1 << SAMPLE_BITS {
            if number >= size {
                break;
            }
            at += stride;
            if at >= count {
                at -= count;
            }
            let candidate = counter_at(offset + at).unwrap_or(NO_COUNTER);
            ejected += 100;
            if records.ejected_until(client, candidate) <= now || ejected > allowed {
                ejected -= 100;
                good += 1;
                // Each of n good ones is selected with the probability 1/n (reservoir sampling).
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if scale(random, good) == 0 {
                    position = offset + at;
                    counter = candidate;
                }
            }
            // Or else the verifier would follow each sequence of outcomes to the end.
            for it in [&mut at, &mut good, &mut ejected, &mut random, &mut position, &mut counter] {
                *it = it.wrapping_add(zero);
            }
        }
    }
    records.try_again(client, counter, now);
    position
}

/// Which failures a slot reports: the backend of its connection, and how many failures eject that.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Watch(u32);

/// How many bits the index of a counter has.
const COUNTER_BITS: u32 = (MAX_CHUNKS * COUNTERS_PER_CHUNK as u32).trailing_zeros();

impl Watch {
    /// None.
    pub const NONE: Self = Self(0);
    /// Not a connection, but the datagrams of an unconnected socket.
    pub const UNCONNECTED: Self = Self(u32::MAX);

    /// Those of a connection to the backend with this counter; none are reported if the policy ejects none.
    #[inline(always)]
    pub const fn new(backend: CounterIndex, policy: HealthPolicy) -> Self {
        // No branch, of which the verifier would follow both ways to the end: without a counter, no record is ever read.
        Self((policy.failures as u32) << COUNTER_BITS | backend)
    }

    /// The counter of the backend.
    #[inline(always)]
    pub const fn backend(self) -> CounterIndex {
        self.0 & ((1 << COUNTER_BITS) - 1)
    }

    /// How many failures eject it; 0 if none does, or this connection has failed already.
    #[inline(always)]
    pub const fn failures(self) -> u32 {
        self.0 >> COUNTER_BITS
    }

    /// The same after a failure.
    #[inline(always)]
    #[must_use]
    pub const fn failed(self) -> Self {
        Self(self.backend())
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
/// How many such words there are.
pub const WORDS: u32 = 4;

const _: () = assert!(size_of::<FailureRecord>() == 24);
const _: () = assert!((MAX_FAILURES as u32) < 1 << (32 - COUNTER_BITS));
const _: () = assert!((MAX_CHUNKS * COUNTERS_PER_CHUNK as u32).is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn fail(record: &mut FailureRecord, at: u64) -> bool {
        record.fail(at, 3, 5 * SECOND, 60 * SECOND)
    }

    #[test]
    fn a_backend_is_ejected_by_failures_in_a_row_for_doubled_times() {
        let mut record = FailureRecord::default();
        assert!(!fail(&mut record, SECOND) && !fail(&mut record, SECOND) && record.until == 0);
        let mut now = SECOND;
        for time in [5, 10, 20, 40, 60, 60] {
            assert!(fail(&mut record, now));
            assert_eq!(record.until, now + time * SECOND);
            // Those that began before the ejection.
            assert!(!fail(&mut record, now + 1));
            now = record.until;
            record.try_again(now - 1);
            assert_eq!(record.is_on_trial, 0);
            record.try_again(now);
            assert_eq!((record.is_on_trial, record.until), (1, now + TRIAL_TIME), "only one tries");
            now += SECOND;
        }
        // One that tried is enough, however many are needed otherwise.
        record.try_again(now + 60 * SECOND);
        assert!(record.fail(now + 61 * SECOND, 100, 5 * SECOND, 60 * SECOND));
        now = record.until;
        record.ejections = u16::MAX;
        assert!(fail(&mut record, now) && record.until == now + 60 * SECOND);
    }

    #[test]
    fn a_watch_is_a_counter_and_a_number_of_failures() {
        let policy = HealthPolicy { failures: MAX_FAILURES, max_ejected: 100 };
        let last = MAX_CHUNKS * COUNTERS_PER_CHUNK as u32 - 1;
        for backend in [0, 7, last] {
            let watch = Watch::new(backend, policy);
            assert_eq!((watch.backend(), watch.failures()), (backend, 100));
            assert_eq!((watch.failed().backend(), watch.failed().failures()), (backend, 0));
            assert_ne!(watch, Watch::UNCONNECTED);
        }
        assert_ne!(Watch::new(NO_COUNTER, policy), Watch::UNCONNECTED);
        assert!(
            Watch::new(NO_COUNTER, policy).backend() > COUNTERS_PER_CHUNK as u32,
            "no record of another one"
        );
        assert_eq!(Watch::new(7, HealthPolicy::default()).failures(), 0);
    }

    #[test]
    fn a_key_names_client_and_backend() {
        assert_eq!(key_parts(key(client(5), 7)), (client(5), 7));
    }
}
