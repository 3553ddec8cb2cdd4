//! `kube-proxy-userspace`: a service proxy of ordinary sockets. It listens where clients find a Service, and copies bytes to
//! an endpoint.
//!
//! It needs no privilege and no feature of the kernel but sockets, and costs two connections and two copies where other
//! backends cost nothing. Endpoints see the proxy as their client, SCTP is not served, and traffic that must be dropped is
//! refused.

#![forbid(unsafe_code)]

mod affinity;
mod claims;
mod datapath;
mod frontend;
mod listen_at;
mod listener;
mod table;
mod tcp;
mod udp;

#[cfg(test)]
mod tests;

use std::{convert::Infallible, process::ExitCode};

use clap::Parser;
use proxy_contract::{
    backend::{self, Backend, Changed, Flags, NotServed},
    client::State,
    localv1::Extension,
};

use self::{datapath::Datapath, listen_at::ListenAt};

/// Serve Services by ordinary sockets that copy bytes, without privilege
///
/// Follows a brain and listens where clients find its Services, until SIGTERM or Ctrl-C. TCP and UDP are served while this
/// process runs; nothing remains after it.
#[derive(Debug, Parser)]
#[command(name = "kube-proxy-userspace", version, max_term_width = 100)]
struct Arguments {
    /// Where it listens
    #[arg(long, value_name = "WHERE", default_value = "loopback")]
    listen: ListenAt,
    #[command(flatten)]
    flags: Flags,
}

impl Backend for Datapath {
    const EXTENSIONS: &[Extension] = &[Extension::OtherServing];

    type Error = Infallible;

    async fn apply(&mut self, state: &State, changed: Changed<'_>) -> Result<Vec<NotServed>, Infallible> {
        match changed {
            Changed::Everything => self.apply_all(&state.services),
            Changed::Services(names) => self.apply_some(&state.services, names),
        }
        Ok(self.not_served())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Arguments { listen, flags } = Arguments::parse();
    let mut datapath = Datapath::new(listen, flags.cluster_cidr.clone());
    backend::main(&flags, &mut datapath).await
}
