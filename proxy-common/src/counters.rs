//! Where connections and refused connections are counted.
//!
//! Counters are addressed by index. They come in *chunks*, each an array map whose rows hold every counter of the chunk
//! once: one row per *stripe*, which some of the CPUs share, and [`METADATA_ROWS`] more. No counter is ever reset, so that no
//! concurrent increment is lost: the value of a counter is the sum of its stripes minus its base.
//! The layout outlasts upgrades (see [`crate::COUNTERS_VERSION`]), and so do the values: a counter belongs to a name,
//! whatever the generation.

pub type CounterIndex = u32;

/// The index, also of a service port's first counter, of what is not counted; it is beyond the last chunk.
pub const NO_COUNTER: CounterIndex = CounterIndex::MAX - (COUNTERS_PER_PORT - 1);

pub const COUNTERS_PER_CHUNK: usize = 4096;

/// How many chunks there can be: enough counters for 30 million backends.
pub const MAX_CHUNKS: u32 = 8192;

/// One row of a chunk: all its counters, as counted by the CPUs of one stripe.
pub type CounterStripe = [u64; COUNTERS_PER_CHUNK];

/// How many CPUs count in a row of their own; if there are more, several share a row, which only costs time when they
/// increment the same counter at the same moment. A power of two.
pub const MAX_STRIPES: u32 = 8;

/// The rows of a chunk after its stripes; the first is that of the owner of each counter. Programs write to [`OPEN_ROW`] alone,
/// user space to all others.
pub const METADATA_ROWS: u32 = 4;
/// The row of the base of each counter, counted from that of the owners, like those below.
pub const BASE_ROW: u32 = 1;
/// The row of the open connections of backends, of Services that choose by them: incremented when one begins, decremented
/// when its socket is closed, and like a counter never reset.
pub const OPEN_ROW: u32 = 2;
/// The row of the [`BackendAge`] of each backend.
pub const AGE_ROW: u32 = 3;

/// Since when a backend has been in its Service; and what corrects the count of its open connections.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct BackendAge {
    /// When it came into its Service, in seconds of the monotonic clock.
    pub began: u32,
    /// What is added to the count.
    pub correction: i32,
}

impl BackendAge {
    #[inline(always)]
    pub const fn from_bits(bits: u64) -> Self {
        Self { began: bits as u32, correction: (bits >> 32) as i32 }
    }

    pub const fn bits(self) -> u64 {
        (self.correction as u32 as u64) << 32 | self.began as u64
    }

    /// The open connections as they were counted, from what [`OPEN_ROW`] has: negative if some were missed.
    #[inline(always)]
    pub const fn counted(self, count: u64) -> i64 {
        (count as i64).wrapping_add(self.correction as i64)
    }

    /// The open connections, from what [`OPEN_ROW`] has.
    #[inline(always)]
    pub const fn open(self, count: u64) -> u64 {
        let counted = self.counted(count);
        if counted < 0 { 0 } else { counted as u64 }
    }

    /// The share of the backend, out of `slow_start` seconds, or out of 1 if that is 0: it grows with the age from a tenth on.
    #[inline(always)]
    pub const fn share(self, now: u32, slow_start: u32) -> u32 {
        if slow_start == 0 {
            return 1;
        }
        let age = now.wrapping_sub(self.began);
        let least = slow_start.div_ceil(10);
        if age >= slow_start {
            slow_start
        } else if age < least {
            least
        } else {
            age
        }
    }
}

/// Connections of a service port, relative to its first counter; its [`COUNTERS_PER_PORT`] counters lie in one chunk.
pub const CONNECTIONS: CounterIndex = 0;
/// Connections that found no backend.
pub const NO_BACKEND: CounterIndex = 1;
/// System calls denied for another reason: a bind to the node port, a datagram whose socket has no memory left.
pub const DENIED: CounterIndex = 2;
pub const LEFT_TO_PACKETS: CounterIndex = 3;
/// How many counters a service port has. A power of two.
pub const COUNTERS_PER_PORT: CounterIndex = 4;

/// Packets, and then bytes, that the node sent on to the nodes that serve them: of a port whose packets are forwarded, relative to
/// the first one of its [`ForwardCounters::arrived`]. Like those of a port, each has [`COUNTERS_PER_PORT`] counters.
pub const SENT: CounterIndex = 0;
/// Packets, and then bytes, that arrived from outside at the node that serves them.
pub const SERVED: CounterIndex = 2;
/// Packets, and then bytes, that other nodes sent, relative to the first one of [`ForwardCounters::forwarded`].
pub const RECEIVED: CounterIndex = 0;
/// Packets of unknown connections that went on to the second.
pub const SECOND_CHANCES: CounterIndex = 2;
/// Packets that were dropped, or answered with an ICMP message because they are too big.
pub const DROPPED: CounterIndex = 3;

/// The counters of a port whose packets are forwarded.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct ForwardCounters {
    /// Of packets from outside.
    pub arrived: CounterIndex,
    /// Of packets between nodes.
    pub forwarded: CounterIndex,
}

impl Default for ForwardCounters {
    fn default() -> Self {
        Self { arrived: NO_COUNTER, forwarded: NO_COUNTER }
    }
}

#[inline(always)]
pub const fn chunk_of(counter: CounterIndex) -> u32 {
    counter / COUNTERS_PER_CHUNK as u32
}

#[inline(always)]
pub const fn index_in_chunk(counter: CounterIndex) -> usize {
    counter as usize % COUNTERS_PER_CHUNK
}

const _: () = assert!(COUNTERS_PER_CHUNK.is_power_of_two());
const _: () = assert!(COUNTERS_PER_CHUNK.is_multiple_of(COUNTERS_PER_PORT as usize));
const _: () = assert!(MAX_STRIPES.is_power_of_two());
const _: () = assert!(chunk_of(NO_COUNTER) >= MAX_CHUNKS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_has_one_place() {
        let size = COUNTERS_PER_CHUNK as u32;
        for (counter, place) in
            [(0, (0, 0)), (1, (0, 1)), (size - 1, (0, 4095)), (size, (1, 0)), (7 * size + 9, (7, 9))]
        {
            assert_eq!((chunk_of(counter), index_in_chunk(counter)), place, "{counter}");
        }
        let last = chunk_of(NO_COUNTER + (COUNTERS_PER_PORT - 1));
        assert_eq!(
            (chunk_of(NO_COUNTER), last),
            (last, u32::MAX / size),
            "a service port's counters are in one chunk"
        );
        assert!(NO_COUNTER.is_multiple_of(COUNTERS_PER_PORT), "as every service port's first counter is");
    }

    #[test]
    fn an_age_is_stored_as_its_bits() {
        for (began, correction) in
            [(0, 0), (u32::MAX, 0), (0, -1), (5, 7), (u32::MAX, i32::MIN), (1, i32::MAX)]
        {
            let age = BackendAge { began, correction };
            assert_eq!(BackendAge::from_bits(age.bits()), age);
        }
        assert_eq!(BackendAge { began: 3, correction: 2 }.bits(), 2 << 32 | 3);
    }

    #[test]
    fn missed_connections_are_corrected_and_never_open() {
        let age = BackendAge { began: 0, correction: -3 };
        for (count, counted, open) in [(5, 2, 2), (4, 1, 1), (3, 0, 0), (2, -1, 0), (u64::MAX, -4, 0)] {
            assert_eq!((age.counted(count), age.open(count)), (counted, open), "{count}");
        }
    }

    #[test]
    fn a_share_grows_with_the_age() {
        let share = |now, slow_start| BackendAge { began: 100, correction: 0 }.share(now, slow_start);
        assert_eq!(share(100, 0), 1);
        for (now, expected) in [(100, 3), (102, 3), (103, 3), (104, 4), (129, 29), (130, 30), (200, 30)] {
            assert_eq!(share(now, 30), expected, "at {now}");
        }
    }
}
