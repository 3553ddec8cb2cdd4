//! How the datapath is configured.

use std::{path::PathBuf, time::Duration};

use datapath::{NodePortAddresses, PassiveHealthOptions};

#[derive(Clone, Debug)]
pub struct Options {
    /// The cgroup whose sockets are translated; by default the root of a cgroup2 mount, preferably the machine's own.
    pub cgroup: Option<PathBuf>,
    /// The folder for pins, on a bpf file system.
    pub pin_dir: PathBuf,
    /// The kernel's switch for short grace periods, `/sys/kernel/rcu_expedited`; empty if it is not to be touched.
    pub rcu_expedited: PathBuf,
    /// How many sockets have a slot for their translation, a power of two; further ones use the overflow table, which is
    /// slower.
    pub socket_slots: u32,
    /// How many Service addresses the overflow table has room for, which holds those that do not fit into slots; a power of
    /// two.
    pub udp_addresses: u32,
    /// How many clients of Services with session affinity are remembered, a power of two; the least recently used one is
    /// evicted first.
    pub affinity_clients: u32,
    /// Whether only sockets of the node's own network namespace are translated.
    pub host_only: bool,
    /// Cgroups whose processes are excluded from translation, with all cgroups below; they need not exist yet.
    pub excluded_cgroups: Vec<PathBuf>,
    /// Whether pods are excluded as their annotations say.
    pub pod_annotations: bool,
    /// The name of this node's Node object.
    pub node_name: String,
    pub node_port_addresses: NodePortAddresses,
    /// Whether processes on the node are kept from binding a node port.
    pub protect_node_ports: bool,
    /// The UDP port at which packets from outside are received that other nodes forward.
    pub forwarding_port: u16,
    /// Whether packets are forwarded in the driver of an interface, if it has native XDP.
    pub forwarding_in_driver: bool,
    /// How long a node may leave probes unanswered before packets from outside go to others; `None` if nodes are not probed.
    pub forwarding_timeout: Option<Duration>,
    pub passive_health: PassiveHealthOptions,
}
