//! Flags that several commands share, parsed into types that hold only valid values.

mod conntrack;
mod datapath;
mod listen;
mod node;
mod packets;
mod passive_health;
mod reports;
mod selection;
mod source;
mod tls;

pub(super) use self::{
    conntrack::InitFlag,
    datapath::{DatapathFlags, GracePeriodFlags, PinFlags, PodFlags},
    listen::{DEFAULT_SOCKET, ListenFlags, UpstreamFlags},
    node::NodeFlags,
    packets::{PACKETS, PACKETS_OFF, PacketFlags, apply, implied_off},
    reports::{ReportFlags, STATUS_HINT, StatusSocketFlag, UiFlag},
    selection::ForwardingFlag,
    source::{MetadataFlags, SourceArg, SourceFlags, SourceOptions, source},
    tls::ClientTlsFlags,
};
