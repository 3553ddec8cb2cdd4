//! Where a brain serves, and where an agent finds it.

use anyhow::Result;
use clap::Args;
use listeners::SocketAccess;
use nix::unistd::Group;
use proxy_contract::{Target, Targets, client::Client};

use super::tls::{ClientTlsFlags, ServerTlsFlags};

pub(in crate::cli) const DEFAULT_SOCKET: &str = "unix:///run/kube-proxy-ebpf/proxy.sock";

/// The brain that an agent follows.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct UpstreamFlags {
    /// Address of the brain: unix:///path, tcp://host:port or host:port
    ///
    /// Of several addresses, with commas between, and of several addresses of a host, one is followed: a random one whose brain
    /// has a state. When that brain is lost, another one is followed.
    #[arg(long, value_name = "ADDRESS", default_value = DEFAULT_SOCKET)]
    target: Targets,
    #[command(flatten)]
    tls: ClientTlsFlags,
}

impl UpstreamFlags {
    pub(in crate::cli) fn client(self, node: &str) -> Result<Client> {
        self.tls.client(Client::new(self.target, node))
    }
}

/// Where a brain serves, nowhere by default, and whose states.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Other processes")]
pub(in crate::cli) struct ListenFlags {
    /// Serve the node's state over gRPC at this address: unix:///path, tcp://host:port or host:port
    ///
    /// Can be repeated. Unix sockets have mode 0600 (--socket-mode). TCP addresses must be loopback addresses unless mutual TLS is enabled
    /// (--tls-cert). Services: localv1.Sets/Watch (KPNG's backends), localnetv1.Endpoints/Next, globalv1.Sets/Watch
    /// (other brains), health and reflection. With --source kube, other brains need --serve-any-node or --watch-all-nodes:
    /// otherwise only this node's own Node object is known here.
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    pub(in crate::cli) listen: Vec<Target>,
    /// Mode of the Unix sockets of --listen, in octal; 0660 lets --socket-group connect
    ///
    /// Who can connect sees the state of every node that is served. Others than the user and the group cannot be allowed.
    #[arg(long, value_name = "MODE", default_value = "0600", value_parser = mode)]
    socket_mode: u32,
    /// Group of the Unix sockets of --listen, by name or number, for backends that are not root [default: this process's own]
    #[arg(long, value_name = "GROUP", value_parser = group)]
    socket_group: Option<u32>,
    #[command(flatten)]
    pub(in crate::cli) tls: ServerTlsFlags,
    /// Serve the state of any node on request, not only of this node
    ///
    /// The state of a node is computed while a client follows it, and for a short time after. A node without a Node object
    /// has no zone; at most 5,000 such nodes can be followed at a time. With --source kube, all Nodes are watched.
    #[arg(long)]
    pub(in crate::cli) serve_any_node: bool,
}

impl ListenFlags {
    /// Who may connect to the Unix sockets.
    pub(in crate::cli) fn access(&self) -> SocketAccess {
        SocketAccess { mode: self.socket_mode, group: self.socket_group }
    }
}

fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).map_err(|_| "not an octal mode such as 0660")?;
    match mode {
        mode if mode & !0o770 != 0 => {
            Err("it lets others connect than the user and the group; use 0660".into())
        }
        mode if mode & 0o600 != 0o600 => Err("the user itself could not connect; use 0600 or 0660".into()),
        mode => Ok(mode),
    }
}

fn group(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let found = Group::from_name(text).map_err(|error| format!("looking it up: {error}"))?;
    let group = found.ok_or("no such group on this host; give its number if it is not in /etc/group")?;
    Ok(group.gid.as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_for_its_user_and_group_only() {
        assert_eq!([mode("0600"), mode("660"), mode("0770")], [Ok(0o600), Ok(0o660), Ok(0o770)]);
        for invalid in ["0666", "0604", "1660", "0440", "0060", "rw", "", "-1", "888"] {
            assert!(mode(invalid).is_err(), "{invalid}");
        }
        assert_eq!([group("0"), group("root"), group("4711")], [Ok(0), Ok(0), Ok(4711)]);
        assert!(group("no such group").unwrap_err().contains("give its number"));
    }
}
