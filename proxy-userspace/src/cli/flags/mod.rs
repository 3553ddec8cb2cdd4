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

use std::time::Duration;

use clap::{Arg, ArgAction};
use jiff::SignedDuration;

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

/// Makes an argument a switch as kube-proxy has them: off, unless it is given alone or as `--flag=true`.
trait SwitchArg {
    fn switch(self) -> Self;
}

impl SwitchArg for Arg {
    fn switch(self) -> Self {
        let values = self.value_name("true|false").default_value("false").action(ArgAction::Set);
        values.num_args(0..=1).require_equals(true).default_missing_value("true")
    }
}

/// A duration in Go's notation, such as 1h30m, or 0.
pub(super) fn go_duration(text: &str) -> Option<Duration> {
    match text {
        "0" => Some(Duration::ZERO),
        _ => text.parse::<SignedDuration>().ok()?.try_into().ok(),
    }
}
