//! The flags of a backend, beyond those of a client.

use std::{
    io::{self, IsTerminal as _},
    net::SocketAddr,
    time::Duration,
};

use clap::{Args, ValueEnum};
use ipnet::IpNet;
use tracing_subscriber::{EnvFilter, fmt, util::SubscriberInitExt as _};

use crate::client;

/// The flags that all backends have; flatten them into the backend's own. Names are those of kube-proxy where it has them.
// A backend may have a group of this name.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Flags {
    #[command(flatten)]
    pub(super) client: client::Flags,
    /// Ranges whose sources are inside the cluster, such as those of pods
    #[arg(long, value_name = "CIDR", value_delimiter = ',', env = "KUBE_PROXY_EBPF_CLUSTER_CIDRS")]
    pub cluster_cidr: Vec<IpNet>,
    /// How often what was written is checked, and written again if something else has changed it
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub sync_period: Duration,
    /// Address of the page /healthz; none if empty
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:10256", value_parser = page)]
    pub healthz_bind_address: Page,
    /// Address of the page /metrics; none if empty
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:10249", value_parser = page)]
    pub metrics_bind_address: Page,
    /// What is logged: a level (error, warn, info, debug, trace), or directives such as proxy_contract=debug
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = log_filter)]
    pub log_level: String,
    /// The form of the log
    #[arg(long, value_name = "FORM", default_value = "text")]
    log_format: LogFormat,
}

/// The address of a page; `None` for no page.
type Page = Option<SocketAddr>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Lines for people
    Text,
    /// An object per line
    Json,
}

impl Flags {
    /// Whether an address is in one of the ranges of `--cluster-cidr`.
    pub fn is_in_cluster(&self, address: std::net::IpAddr) -> bool {
        self.cluster_cidr.iter().any(|it| it.contains(&address.to_canonical()))
    }

    /// Installs the log, on standard error.
    pub(super) fn install_log(&self) {
        let log = fmt().with_env_filter(EnvFilter::new(&self.log_level)).with_target(false);
        let log = log.with_ansi(io::stderr().is_terminal()).with_writer(io::stderr);
        let installed = match self.log_format {
            LogFormat::Text => log.finish().try_init(),
            LogFormat::Json => log.json().finish().try_init(),
        };
        if let Err(error) = installed {
            tracing::debug!(%error, "another log is installed");
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(it @ 1..=86_400) => Ok(Duration::from_secs(it)),
        _ => Err("it must be a number of seconds, 1 to 86400".to_owned()),
    }
}

fn page(text: &str) -> Result<Page, String> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse()
        .map(Some)
        .map_err(|_| "it must be an address and a port, such as 127.0.0.1:10249, or empty".to_owned())
}

fn log_filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|it| it.to_string())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Arguments {
        #[command(flatten)]
        flags: Flags,
    }

    fn parse(arguments: &[&str]) -> Result<Flags, String> {
        let all = ["backend"].iter().chain(arguments);
        Arguments::try_parse_from(all).map(|it| it.flags).map_err(|it| it.to_string())
    }

    #[test]
    fn a_page_without_an_address_is_none() {
        let flags = parse(&["--healthz-bind-address=", "--cluster-cidr", "10.0.0.0/8,fd00::/8"]).unwrap();
        assert!(flags.healthz_bind_address.is_none() && flags.metrics_bind_address.is_some());
        assert!(flags.is_in_cluster("::ffff:10.1.2.3".parse().unwrap()));
        assert!(!flags.is_in_cluster("192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn a_wrong_value_is_named_with_its_remedy() {
        let bad = [
            (["--metrics-bind-address", "10249"], "such as 127.0.0.1:10249"),
            (["--sync-period", "0"], "1 to 86400"),
            (["--log-level", "a=b=c"], "--log-level"),
            (["--cluster-cidr", "10.0.0.0/99"], "--cluster-cidr"),
        ];
        for (arguments, expected) in bad {
            let error = parse(&arguments).unwrap_err();
            assert!(error.contains(expected) && error.contains(arguments[1]), "{error}");
        }
    }
}
