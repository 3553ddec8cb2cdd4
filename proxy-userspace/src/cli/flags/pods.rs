//! Whether annotations of pods are honored.

use clap::Args;
use datapath_ebpf as ebpf;

/// Whether annotations of pods are honored.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct PodFlags {
    /// Honor the annotation kube-proxy-ebpf.io/socket-lb of pods: leave their sockets to packets
    ///
    /// `"off"` leaves all sockets of the pod, `tcp-only` those of UDP. Of an API server the metadata of Pods is watched: of this
    /// node's, or of all with --serve-any-node. The permission to list and watch Pods cannot be limited to a node's. An
    /// agent needs the flag, too. With it, each connect(2) looks the cgroup of its program up, at three levels.
    #[arg(long, help_heading = "Datapath")]
    pub(in crate::cli) pod_annotations: bool,
}

impl PodFlags {
    /// The options of the eBPF datapath, with this flag.
    pub(in crate::cli) fn of_sockets(&self, options: ebpf::Options) -> ebpf::Options {
        ebpf::Options { pod_annotations: self.pod_annotations, ..options }
    }
}
