//! The kernel features that programs use, and where they find the fields that they read.
//!
//! Programs get them as constants, so that the verifier never sees a branch that this kernel cannot run.

use std::fs;

use aya::{
    EbpfLoader,
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
    util::KernelVersion,
};

use model::error_chain;

use crate::{btf, capabilities, error::Error, failpoint};

/// The constants of the programs, by name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features([(&'static str, u32); 7]);

/// The constants that let programs read the kernel's sockets.
const SOCKET_READS: [&str; 2] = ["TCP_SOCK", "ANY_SOCK"];

impl Features {
    /// Detects the features of this kernel.
    pub(super) fn detect() -> Self {
        let has = |helper| is_helper_supported(ProgramType::CgroupSockAddr, helper).unwrap_or(false);
        let kern_sock =
            fs::read(btf::KERNEL).ok().and_then(|it| btf::member_offset(&it, "sock", "sk_kern_sock"));
        let can_read = |helper| u32::from(kern_sock.is_some() && has(helper));
        // An offset beyond the end of a socket, which the verifier refuses to read.
        let refused = failpoint::is_enabled("sockets-not-shown").then_some(1 << 20);
        let offset = refused.or(kern_sock).unwrap_or(0);
        let keeps_addresses = KernelVersion::current().is_ok_and(|it| it >= KernelVersion::new(6, 6, 0));
        Self([
            ("SET_RETVAL", has(BpfHelper::BPF_FUNC_set_retval).into()),
            ("MPTCP", has(BpfHelper::BPF_FUNC_skc_to_mptcp_sock).into()),
            ("TCP_SOCK", can_read(BpfHelper::BPF_FUNC_skc_to_tcp_sock)),
            ("ANY_SOCK", can_read(BpfHelper::BPF_FUNC_probe_read_kernel)),
            ("KERNEL_TCP", keeps_addresses.into()),
            ("KERN_SOCK_BYTE", offset / 8),
            ("KERN_SOCK_BIT", 1 << (offset % 8)),
        ])
    }

    /// The same without reading the kernel's sockets; `None` if these features do not read them.
    pub(super) fn without_socket_reads(self) -> Option<Self> {
        let reads = |it: &(&str, u32)| SOCKET_READS.contains(&it.0) && it.1 != 0;
        let without = self.0.map(|it| if reads(&it) { (it.0, 0) } else { it });
        self.0.iter().any(reads).then_some(Self(without))
    }

    /// Sets the constants of the programs.
    pub(super) fn apply_to<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        for (name, value) in &self.0 {
            loader.override_global(name, value, true);
        }
    }
}

/// Loads something with the features of this kernel; without reads of the kernel's sockets if the verifier refuses those.
pub(super) fn with_features<T>(load: impl Fn(Features) -> Result<T, Error>) -> Result<T, Error> {
    check_btf()?;
    let features = Features::detect();
    match (load(features), features.without_socket_reads()) {
        // With a missing capability the second attempt would fail, too.
        (Err(error @ Error::Program { .. }), Some(fewer)) if !capabilities::is_any_missing() => {
            let loaded = load(fewer)?;
            tracing::warn!(
                "this kernel does not let programs read the owner of a socket; the calling process is checked \
                 instead: {}",
                error_chain(&error)
            );
            Ok(loaded)
        }
        (loaded, _) => loaded,
    }
}

/// Fails if the loader has not found what every supported kernel has. It tries each feature once in a process and takes any error
/// for a lack; it would load the programs without the BTF of their functions then, and the verifier, which checks global
/// functions once, would follow each of their paths for minutes.
fn check_btf() -> Result<(), Error> {
    let features = aya::features();
    let has_btf = features.btf().is_some_and(|it| it.btf_func() && it.btf_func_global() && it.btf_datasec());
    // A missing capability is reported by the load, with its remedy.
    if (has_btf && features.bpf_global_data()) || capabilities::is_any_missing() {
        return Ok(());
    }
    Err(Error::NoBtf)
}
