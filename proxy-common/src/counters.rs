//! Where connections, refusals and rejections are counted.
//!
//! A counter is a run of *cells*, found by the number of its first one. Cells come in *chunks*, each a map of rows that
//! hold every cell of the chunk once: a row per *stripe*, in which some of the CPUs count, and two rows of user space's
//! own. No cell is ever set back, so that nothing which is counted meanwhile is lost: what a counter has counted is the
//! sum of its stripes, less its base.
//! The layout outlasts upgrades (see [`crate::COUNTERS_VERSION`]), and so does what it holds: a counter belongs to a name,
//! whatever the generation.

/// The number of a cell.
pub type Cell = u32;

/// The cells of what is not counted; no chunk reaches so far.
pub const UNCOUNTED: Cell = Cell::MAX - (PORT_CELLS - 1);

/// How many cells a chunk has.
pub const CELLS: usize = 4096;

/// How many chunks there can be. More cells than all of them have would be those of 30 million backends.
pub const CHUNKS: u32 = 8192;

/// One row of a chunk: all its cells.
pub type Row = [u64; CELLS];

/// How many CPUs count in a row of their own; if there are more, several share one, which costs them nothing unless they
/// count the same at the same moment. A power of two.
pub const MOST_STRIPES: u32 = 8;

/// The rows of a chunk beside its stripes: the owner of each cell, and its base.
pub const OWN_ROWS: u32 = 2;

/// The cells of a service port, counted from its first one; it has [`PORT_CELLS`], all in one chunk.
pub const CONNECTIONS: Cell = 0;
/// Connections that found no backend.
pub const REFUSALS: Cell = 1;
/// What was refused for another reason: a bind to the node port, a datagram of a socket without memory left.
pub const REJECTIONS: Cell = 2;
/// How many cells a service port has; the last one is for what later versions count. A power of two.
pub const PORT_CELLS: Cell = 4;

/// The chunk that a cell is in.
#[inline(always)]
pub const fn chunk(cell: Cell) -> u32 {
    cell / CELLS as u32
}

/// The place of a cell in the rows of its chunk.
#[inline(always)]
pub const fn place(cell: Cell) -> usize {
    cell as usize % CELLS
}

const _: () = assert!(CELLS.is_power_of_two() && CELLS.is_multiple_of(PORT_CELLS as usize));
const _: () = assert!(MOST_STRIPES.is_power_of_two());
const _: () = assert!(chunk(UNCOUNTED) >= CHUNKS);
