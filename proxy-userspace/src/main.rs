//! kube-proxy-ebpf: a Kubernetes service proxy with an eBPF data plane.

#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!(
    "kube-proxy-ebpf does not support big-endian machines: its kernel object and its maps are little-endian"
);

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    datapath_ebpf::keep_one_heap();
    datapath_ebpf::use_no_library_of_the_node();
    cli::main()
}
