//! kube-proxy-ebpf: a Kubernetes service proxy with an eBPF data plane.

#![forbid(unsafe_code)]

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    datapath_ebpf::keep_one_heap();
    cli::main()
}
