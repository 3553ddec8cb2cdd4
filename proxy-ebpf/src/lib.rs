//! The kernel side of kube-proxy-ebpf.
