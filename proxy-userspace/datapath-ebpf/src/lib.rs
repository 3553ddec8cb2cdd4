//! The eBPF datapath: compiles a state into tables, writes them into double-buffered maps, and keeps the programs attached.

mod active_frontends;
mod allowed_backends;
mod bpf_maps;
mod btf;
mod capabilities;
mod cgroup;
mod cgroup_paths;
mod compile;
mod connected_backends;
mod counter_alloc;
mod counter_maps;
mod datapath;
mod double_buffer;
mod dump;
mod embedded;
mod error;
mod exclusions;
mod failpoint;
mod failure_records;
mod features;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
#[cfg(any(test, feature = "fuzzing"))]
mod generation;
mod hash_map;
mod hook_status;
mod hooks;
mod layout;
mod lookup;
mod map_spec;
mod map_updates;
mod node_addresses;
mod open_connections;
mod options;
mod pins;
mod pod_cgroups;
mod program_log;
mod raw_bpf;
mod socket_termination;
mod store;
mod table_family;
mod table_stats;
mod trace;
mod trial_connects;

pub mod check;
mod clock;
pub mod probe;

#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), expect(dead_code, reason = "the fuzz targets use a part of it"))]
mod fake_maps;
#[cfg(test)]
mod fixtures;

pub use self::datapath::{Datapath, cleanup};
pub use active_frontends::{ActiveFrontends, FrontendRow};
pub use allowed_backends::{
    AllowedBackends, BackendPair, as_node_port, frontends, pairs, udp_differs, udp_lost,
};
pub use cgroup::{find_cgroup2, is_nested_cgroup};
pub use cgroup_paths::{CgroupPaths, pod_uid};
pub use connected_backends::ConnectedBackends;
pub use counter_maps::{Counts, counts};
pub use dump::{dump, generation};
pub use error::Error;
pub use hook_status::query_at;
pub use lookup::{EjectedBackend, Lookup, client_namespace, lookup};
pub use options::Options;
pub use pod_cgroups::CgroupEvents;
pub use program_log::TraceStep;
pub use socket_termination::SocketTerminator;
pub use trace::{
    EndReason, TraceChoice, TraceEnd, TraceEvent, TraceEvents, TraceFilter, TraceVerdict, TracedPrograms,
};
