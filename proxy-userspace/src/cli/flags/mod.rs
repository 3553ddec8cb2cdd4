//! Flags that several commands share, parsed into types that hold only valid values.

mod conntrack;
mod datapath;
mod forwarding;
mod listen;
mod metadata;
mod node;
mod packets;
mod passive_health;
mod pods;
mod reports;
mod selection;
mod source;
mod tls;

pub(super) use self::{
    conntrack::InitFlag,
    datapath::{DatapathFlags, GracePeriodFlags, PinFlags},
    forwarding::ForwardingFlag,
    listen::{DEFAULT_SOCKET, ListenFlags, UpstreamFlags},
    metadata::MetadataFlags,
    node::NodeFlags,
    packets::{PACKETS, PACKETS_OFF, PacketFlags, apply, implied_off},
    pods::PodFlags,
    reports::{ReportFlags, STATUS_HINT, StatusSocketFlag, UiFlag},
    source::{SourceArg, SourceFlags, SourceOptions, source},
    tls::ClientTlsFlags,
};
