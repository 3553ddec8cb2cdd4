//! kube-proxy-ebpf: a Kubernetes service proxy with an eBPF data plane.
fn main() {}
