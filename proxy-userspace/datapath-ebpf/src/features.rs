//! The kernel features that programs use, and where they find the fields that they read.
//!
//! Programs get them as constants, so that the verifier never sees a branch that this kernel cannot run.

use std::fs;

use aya::{
    EbpfLoader,
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};

use crate::{btf, failpoint};

/// The constants of the programs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    set_retval: u32,
    mptcp: u32,
    tcp_sock: u32,
    any_sock: u32,
    kern_sock_byte: u32,
    kern_sock_bit: u32,
}

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
        Self {
            set_retval: has(BpfHelper::BPF_FUNC_set_retval).into(),
            mptcp: has(BpfHelper::BPF_FUNC_skc_to_mptcp_sock).into(),
            tcp_sock: can_read(BpfHelper::BPF_FUNC_skc_to_tcp_sock),
            any_sock: can_read(BpfHelper::BPF_FUNC_probe_read_kernel),
            kern_sock_byte: offset / 8,
            kern_sock_bit: 1 << (offset % 8),
        }
    }

    /// The same without reading the kernel's sockets; `None` if these features do not read them.
    pub(super) fn without_socket_reads(self) -> Option<Self> {
        (self.tcp_sock != 0 || self.any_sock != 0).then_some(Self { tcp_sock: 0, any_sock: 0, ..self })
    }

    /// Sets the constants of the programs.
    pub(super) fn apply_to<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        for (name, value) in [
            ("SET_RETVAL", &self.set_retval),
            ("MPTCP", &self.mptcp),
            ("TCP_SOCK", &self.tcp_sock),
            ("ANY_SOCK", &self.any_sock),
            ("KERN_SOCK_BYTE", &self.kern_sock_byte),
            ("KERN_SOCK_BIT", &self.kern_sock_bit),
        ] {
            loader.override_global(name, value, true);
        }
    }
}
