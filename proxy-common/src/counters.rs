//! Where connections and refused connections are counted.
//!
//! Counters are addressed by index. They come in *chunks*, each an array map whose rows hold every counter of the chunk
//! once: one row per *stripe*, which some of the CPUs share, and two metadata rows that only user space uses. No counter is
//! ever reset, so that no concurrent increment is lost: the value of a counter is the sum of its stripes minus its base.
//! The layout outlasts upgrades (see [`crate::COUNTERS_VERSION`]), and so do the values: a counter belongs to a name,
//! whatever the generation.

/// The index of a counter.
pub type CounterIndex = u32;

/// The index, also of a service port's first counter, of what is not counted; it is beyond the last chunk.
pub const NO_COUNTER: CounterIndex = CounterIndex::MAX - (COUNTERS_PER_PORT - 1);

/// How many counters a chunk has.
pub const COUNTERS_PER_CHUNK: usize = 4096;

/// How many chunks there can be: enough counters for 30 million backends.
pub const MAX_CHUNKS: u32 = 8192;

/// One row of a chunk: all its counters, as counted by the CPUs of one stripe.
pub type CounterStripe = [u64; COUNTERS_PER_CHUNK];

/// How many CPUs count in a row of their own; if there are more, several share a row, which only costs time when they
/// increment the same counter at the same moment. A power of two.
pub const MAX_STRIPES: u32 = 8;

/// The rows of a chunk besides its stripes: the owner of each counter, and its base.
pub const METADATA_ROWS: u32 = 2;

/// Connections of a service port, relative to its first counter; its [`COUNTERS_PER_PORT`] counters lie in one chunk.
pub const CONNECTIONS: CounterIndex = 0;
/// Connections that found no backend.
pub const NO_BACKEND: CounterIndex = 1;
/// System calls denied for another reason: a bind to the node port, a datagram whose socket has no memory left.
pub const DENIED: CounterIndex = 2;
/// How many counters a service port has; the last one is for later versions. A power of two.
pub const COUNTERS_PER_PORT: CounterIndex = 4;

/// The chunk of a counter.
#[inline(always)]
pub const fn chunk_of(counter: CounterIndex) -> u32 {
    counter / COUNTERS_PER_CHUNK as u32
}

/// The position of a counter in the rows of its chunk.
#[inline(always)]
pub const fn index_in_chunk(counter: CounterIndex) -> usize {
    counter as usize % COUNTERS_PER_CHUNK
}

const _: () = assert!(COUNTERS_PER_CHUNK.is_power_of_two());
const _: () = assert!(COUNTERS_PER_CHUNK.is_multiple_of(COUNTERS_PER_PORT as usize));
const _: () = assert!(MAX_STRIPES.is_power_of_two());
const _: () = assert!(chunk_of(NO_COUNTER) >= MAX_CHUNKS);
