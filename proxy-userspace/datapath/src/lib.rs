//! What the eBPF and the nftables datapath share, and what they report.
//!
//! Invariant: plain data and pure functions. Nothing here talks to the kernel or knows either datapath.

mod active_frontends;
mod attach_status;
mod finding;
mod frontend_address;
mod metrics;
mod node_port_addresses;
mod passive_health_options;
mod probe_result;
mod report;
mod sorted_lines;

pub use active_frontends::{ActiveFrontend, described};
pub use attach_status::{AttachStatus, ForeignProgram, HookStatus};
pub use finding::{Checkup, Finding, Level};
pub use frontend_address::{FrontendAddress, invalid_address_reason, unspecified};
pub use node_port_addresses::NodePortAddresses;
pub use passive_health_options::PassiveHealthOptions;
pub use probe_result::{HookBehavior, ProbeResult};
pub use report::{
    ApplyReport, AvoidedEndpoint, AvoidedEndpoints, EjectedEndpoint, Ejections, ForwardCounts, OverflowStats,
    PacketAffinity, PacketCount, PeerCounts, PortCounts, PortId, RefusedNamespace, TableFill, TableStats,
    TerminationReport,
};
pub use sorted_lines::SortedLines;
