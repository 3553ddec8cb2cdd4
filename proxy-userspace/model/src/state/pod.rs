//! Pods whose annotation says how their sockets are served.

use std::{collections::BTreeMap, sync::Arc};

/// Such pods by name; the states of all nodes share it, and each node looks for those that it runs.
pub type Pods = Arc<BTreeMap<Arc<str>, Arc<Pod>>>;

/// A pod whose annotation `kube-proxy-ebpf.io/socket-lb` says how its sockets are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its `namespace/name`.
    pub name: Arc<str>,
    /// The UID by which kubelet names its cgroup.
    pub uid: Arc<str>,
    /// Which of its sockets are load-balanced.
    pub socket_lb: SocketLb,
}

/// Which sockets of a pod are load-balanced, rather than left to packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketLb {
    /// None.
    Off,
    /// Those of TCP.
    TcpOnly,
}
