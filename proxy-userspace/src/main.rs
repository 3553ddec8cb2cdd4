//! kube-proxy-ebpf: a Kubernetes service proxy with an eBPF data plane.

#![forbid(unsafe_code)]

mod cli;

use std::process::ExitCode;

/// Gives back to the system what a start or a burst has needed.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::main()
}
