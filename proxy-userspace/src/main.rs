//! kube-proxy-ebpf: a Kubernetes service proxy with an eBPF data plane.

#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!(
    "kube-proxy-ebpf does not support big-endian machines: its kernel object and its maps are little-endian"
);

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    process::keep_one_heap();
    process::use_no_library_of_the_node();
    cli::main()
}
