//! The maps in the kernel: their specifications, pins, batches, and the records that programs and clients write.
//!
//! May know: [`tables`](crate::tables) and [`host`](crate::host). Decides nothing about Services.

pub(crate) mod bpf_maps;
pub(crate) mod connected_backends;
pub(crate) mod counter_maps;
pub(crate) mod embedded;
pub(crate) mod exclusions;
pub(crate) mod failure_records;
pub(crate) mod features;
pub(crate) mod map_spec;
pub(crate) mod open_connections;
pub(crate) mod pins;
pub(crate) mod pod_cgroups;
pub(crate) mod program_log;
pub(crate) mod record_map;
pub(crate) mod tracked_map;
