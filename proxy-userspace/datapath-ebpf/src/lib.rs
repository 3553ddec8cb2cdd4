//! The eBPF datapath: compiles a state into tables, writes them into double-buffered maps, and keeps the programs attached.

mod datapath;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), expect(dead_code, reason = "the fuzz targets use a part of it"))]
mod fake_maps;
#[cfg(test)]
mod fixtures;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod host;
mod maps;
mod observe;
mod options;
mod programs;
mod tables;

pub use self::datapath::{Datapath, cleanup};
pub use error::Error;
pub use host::cgroup::{find_cgroup2, is_nested_cgroup};
pub use host::cgroup_paths::{CgroupPaths, pod_uid};
pub use host::grace_period::unset_expedited;
pub use maps::connected_backends::ConnectedBackends;
pub use maps::counter_maps::{Counts, counts};
pub use maps::pod_cgroups::CgroupEvents;
pub use maps::program_log::TraceStep;
pub use observe::active_frontends::{ActiveFrontends, FrontendRow};
pub use observe::check;
pub use observe::dump::{dump, generation};
pub use observe::forwards::{ForwardSummary, forward_summary};
pub use observe::lookup::forwarding::{FlowClient, FlowRow, ForwardLookup, RowNode, forward_lookup};
pub use observe::lookup::{EjectedBackend, Lookup, client_namespace, lookup};
pub use options::Options;
pub use programs::hook_status::query_at;
pub use programs::peer_probes::MIN_TIMEOUT as MIN_FORWARDING_TIMEOUT;
pub use programs::probe;
pub use programs::sent_packets::{SentPacket, SentPackets};
pub use programs::socket_termination::SocketTerminator;
pub use programs::trace::{
    EndReason, TraceAffinity, TraceChoice, TraceEjection, TraceEnd, TraceEvent, TraceEvents, TraceFilter,
    TraceVerdict, TracedPrograms,
};
pub use proxy_common::forward::DEFAULT_PORT as DEFAULT_FORWARDING_PORT;
pub use tables::allowed_backends::{
    AllowedBackends, BackendPair, as_node_port, frontends, pairs, udp_differs, udp_lost,
};
pub use tables::layout::forwarding::PacketPath;
pub use tables::maglev::owners as row_owners;
