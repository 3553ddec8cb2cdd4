//! Flags of connection tracking, with kube-proxy's names, defaults and meanings.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use datapath_nft::ConntrackSettings;

use super::{SwitchArg as _, go_duration};

/// The settings of connection tracking.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Connection tracking")]
pub(in crate::cli) struct ConntrackFlags {
    /// Maximum tracked connections per CPU (net.netfilter.nf_conntrack_max); only raised, never lowered; 0 keeps the host's
    /// setting
    #[arg(long, value_name = "NUMBER", default_value_t = 32_768)]
    conntrack_max_per_core: u32,
    /// Minimum limit of tracked connections, regardless of the number of CPUs
    #[arg(long, value_name = "NUMBER", default_value_t = 131_072)]
    conntrack_min: u32,
    /// Timeout of idle established TCP connections, such as 24h; 0 keeps the host's setting
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = timeout)]
    conntrack_tcp_timeout_established: Duration,
    /// Timeout of half-closed TCP connections (CLOSE_WAIT); 0 keeps the host's setting
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = timeout)]
    conntrack_tcp_timeout_close_wait: Duration,
    /// Do not count TCP packets outside the window as invalid (net.netfilter.nf_conntrack_tcp_be_liberal)
    #[arg(long, switch())]
    conntrack_tcp_be_liberal: bool,
    /// Timeout of unanswered UDP flows; 0 keeps the host's setting
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = timeout)]
    conntrack_udp_timeout: Duration,
    /// Timeout of answered UDP flows; 0 keeps the host's setting
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = timeout)]
    conntrack_udp_timeout_stream: Duration,
    /// Folder of these settings; in a container, a mount of the host's /proc/sys/net, since its own is read-only
    #[arg(long, value_name = "PATH", default_value = "/proc/sys/net")]
    proc_sys_net: PathBuf,
}

impl ConntrackFlags {
    pub(super) fn settings(&self) -> ConntrackSettings {
        ConntrackSettings {
            max_per_core: self.conntrack_max_per_core,
            min: self.conntrack_min,
            tcp_established_timeout: self.conntrack_tcp_timeout_established,
            tcp_close_wait_timeout: self.conntrack_tcp_timeout_close_wait,
            tcp_be_liberal: self.conntrack_tcp_be_liberal,
            udp_timeout: self.conntrack_udp_timeout,
            udp_stream_timeout: self.conntrack_udp_timeout_stream,
            proc_sys_net: self.proc_sys_net.clone(),
        }
    }
}

/// How long the kernel tracks a connection.
fn timeout(text: &str) -> Result<Duration, String> {
    match go_duration(text) {
        None => Err("not a duration such as 24h or 1h30m; use 0 to leave it to the host".into()),
        // The kernel counts whole seconds, and 0 would leave the setting to the host.
        Some(it) if !it.is_zero() && it.as_secs() == 0 => {
            Err("shorter than a second; use 1s or more, or 0 to leave it to the host".into())
        }
        Some(it) => Ok(it),
    }
}

/// Whether only the initialization is done.
#[derive(Clone, Copy, Debug, Args)]
pub(in crate::cli) struct InitFlag {
    /// Apply the settings that need a writable /proc/sys (--conntrack-…), and exit
    ///
    /// For a container that runs before this one and has what this one lacks; what cannot be set is logged.
    #[arg(long, switch())]
    pub(in crate::cli) init_only: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_in_the_notation_of_go() {
        for (text, seconds) in
            [("24h0m0s", 86_400), ("24h", 86_400), ("1h30m", 5400), ("0s", 0), ("0", 0), ("90.5s", 90)]
        {
            assert_eq!(timeout(text).map(|it| it.as_secs()), Ok(seconds), "{text}");
        }
        for text in ["", "24", "a day", "-1h", "500ms"] {
            let error = timeout(text).unwrap_err();
            assert!(error.contains("use "), "{text}: {error}");
        }
    }
}
