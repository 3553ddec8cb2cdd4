//! The kernel features that programs use, and where they find the fields that they read.
//!
//! Programs get them as constants, so that the verifier never sees a branch that this kernel cannot run; and the ids of
//! kernel functions in their calls.

use std::fs;

use aya::{
    EbpfLoader,
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
    util::KernelVersion,
};

use aya_obj::generated::{BPF_CALL, BPF_JMP, BPF_PSEUDO_KFUNC_CALL};
use model::error_chain;
use proxy_common::kernel_functions::RDONLY_CAST;

use crate::{
    error::Error,
    host::{btf, capabilities, failpoint},
};

/// What programs use of this kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Features {
    /// The constants of the programs, by name.
    constants: [(&'static str, u32); CONSTANTS],
    /// The BTF id of [`RDONLY_CAST`], if programs cast sockets.
    rdonly_cast: Option<u32>,
}

const CONSTANTS: usize = 14;
/// `SOCK_BINDPORT_LOCK`, as the number of its bit in `sk_userlocks`.
const BINDPORT_LOCK: u32 = 3;

/// The constants that let programs read the kernel's sockets: by a cast, or by helpers.
const SOCKET_READS: [&[&str]; 2] = [&["SOCK_TYPE"], &["TCP_SOCK", "ANY_SOCK", "TCP_MSTAMP"]];

impl Features {
    pub(crate) fn detect() -> Self {
        let has = |helper| is_helper_supported(ProgramType::CgroupSockAddr, helper).unwrap_or(false);
        let types = fs::read(btf::KERNEL).unwrap_or_default();
        let kern_sock = btf::member_offset(&types, "sock", "sk_kern_sock");
        let function = kern_sock.and_then(|_| btf::function_id(&types, "bpf_rdonly_cast"));
        // It begins with its `sock`.
        let cast = function.zip(btf::struct_id(&types, "inet_sock"));
        // A type that no kernel has, which the verifier refuses.
        let not_cast = failpoint::is_enabled("sockets-not-cast").then_some(i32::MAX as u32);
        let sock_type = not_cast.or(cast.map(|(_, sock)| sock)).unwrap_or(0);
        let can_read = |helper| u32::from(kern_sock.is_some() && has(helper));
        // An offset beyond the end of a socket, which the verifier refuses to read.
        let refused = failpoint::is_enabled("sockets-not-shown").then_some(1 << 20);
        let offset = refused.or(kern_sock).unwrap_or(0);
        let port_lock = btf::member_offset(&types, "sock", "sk_userlocks").map(|it| it + BINDPORT_LOCK);
        let field = |of, name| btf::member_offset(&types, of, name).map_or(0, |it| it / 8);
        let probe = BpfHelper::BPF_FUNC_probe_read_kernel;
        let can_probe_released = is_helper_supported(ProgramType::CgroupSock, probe).unwrap_or(false);
        let keeps_addresses = KernelVersion::current().is_ok_and(|it| it >= KernelVersion::new(6, 6, 0));
        let constants = [
            ("SET_RETVAL", has(BpfHelper::BPF_FUNC_set_retval).into()),
            ("MPTCP", has(BpfHelper::BPF_FUNC_skc_to_mptcp_sock).into()),
            ("TCP_SOCK", can_read(BpfHelper::BPF_FUNC_skc_to_tcp_sock)),
            ("ANY_SOCK", can_read(BpfHelper::BPF_FUNC_probe_read_kernel)),
            ("KERNEL_TCP", keeps_addresses.into()),
            ("KERN_SOCK_BYTE", offset / 8),
            ("KERN_SOCK_BIT", 1 << (offset % 8)),
            ("SOCK_TYPE", sock_type),
            ("PORT_LOCK_BYTE", port_lock.unwrap_or(0) / 8),
            ("PORT_LOCK_BIT", port_lock.map_or(0, |it| 1 << (it % 8))),
            ("UNICAST_IF", field("inet_sock", "uc_index")),
            ("PINET6", field("inet_sock", "pinet6")),
            ("UNICAST_IF6", field("ipv6_pinfo", "ucast_oif")),
            ("TCP_MSTAMP", if can_probe_released { field("tcp_sock", "tcp_mstamp") } else { 0 }),
        ];
        Self { constants, rdonly_cast: cast.map(|(function, _)| function) }
    }

    /// These features with a slower way to read the kernel's sockets, or with none; `None` if they do not read them.
    fn with_fewer_socket_reads(self) -> Option<Self> {
        let reads = |it: &(&str, u32), names: &[&str]| names.contains(&it.0) && it.1 != 0;
        let mut ways = SOCKET_READS.iter().filter(|names| self.constants.iter().any(|it| reads(it, names)));
        let fastest = ways.next()?;
        let constants = self.constants.map(|it| if reads(&it, fastest) { (it.0, 0) } else { it });
        // The kernel checks the call of a kernel function even where no path leads to it.
        Some(Self { constants, rdonly_cast: None })
    }

    fn reads_sockets(self) -> bool {
        self.with_fewer_socket_reads().is_some()
    }

    pub(crate) fn apply_to<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        for (name, value) in &self.constants {
            loader.override_global(name, value, true);
        }
    }

    /// A kernel object with the ids of this kernel in the calls of kernel functions. Without an id no path leads to the call,
    /// and the verifier removes it. The last word is padded with zeroes.
    pub(crate) fn link(&self, object: &[u8]) -> Vec<u64> {
        // Instructions in an ELF file are aligned to 8 bytes.
        let mut words = vec![0_u64; object.len().div_ceil(size_of::<u64>())];
        bytemuck::cast_slice_mut(&mut words)[..object.len()].copy_from_slice(object);
        if let Some(id) = self.rdonly_cast {
            let [placeholder, call] = [call(0, RDONLY_CAST), call(BPF_PSEUDO_KFUNC_CALL, id)];
            words.iter_mut().filter(|it| **it == placeholder).for_each(|it| *it = call);
        }
        words
    }
}

/// An instruction that calls a function of a kind, in native byte order.
fn call(kind: u32, function: u32) -> u64 {
    let mut instruction = [0; 8];
    instruction[0] = (BPF_JMP | BPF_CALL) as u8;
    instruction[1] = (kind << if cfg!(target_endian = "little") { 4 } else { 0 }) as u8;
    instruction[4..].copy_from_slice(&function.to_ne_bytes());
    u64::from_ne_bytes(instruction)
}

/// Loads something with the features of this kernel; with fewer reads of the kernel's sockets if the verifier refuses those.
pub(crate) fn with_features<T>(load: impl Fn(Features) -> Result<T, Error>) -> Result<T, Error> {
    check_btf()?;
    let mut features = Features::detect();
    let mut refused = None;
    loop {
        match (load(features), features.with_fewer_socket_reads()) {
            // With a missing capability another attempt would fail, too.
            (Err(error @ Error::Program { .. }), Some(fewer)) if !capabilities::is_any_missing() => {
                if fewer.reads_sockets() {
                    let error = error_chain(&error);
                    tracing::info!(
                        error,
                        "programs cannot cast sockets on this kernel; slower helpers read them"
                    );
                }
                features = fewer;
                refused = Some(error);
            }
            (Ok(loaded), _) => {
                if let Some(error) = refused.filter(|_| !features.reads_sockets()) {
                    let error = error_chain(&error);
                    tracing::warn!(
                        error,
                        "programs cannot read a socket's owner on this kernel; the calling process is checked instead"
                    );
                }
                return Ok(loaded);
            }
            (Err(error), _) => return Err(error),
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::embedded;

    #[test]
    fn calls_of_kernel_functions_are_linked_in_both_objects_if_there_is_an_id() {
        let features = |rdonly_cast| Features { constants: [("", 0); CONSTANTS], rdonly_cast };
        for object in [embedded::bytes().unwrap(), embedded::traced().unwrap()] {
            let count =
                |features: Features, word| features.link(object).iter().filter(|it| **it == word).count();
            let [placeholder, linked] = [call(0, RDONLY_CAST), call(BPF_PSEUDO_KFUNC_CALL, 0x1234)];
            let calls = count(features(None), placeholder);
            assert!(calls > 0);
            assert_eq!(count(features(Some(0x1234)), placeholder), 0);
            assert_eq!(count(features(Some(0x1234)), linked), calls);
        }
    }

    #[test]
    fn a_slower_way_to_read_sockets_is_tried_before_none() {
        let mut constants = [("", 1); CONSTANTS];
        for (constant, name) in constants.iter_mut().zip(["TCP_SOCK", "ANY_SOCK", "SOCK_TYPE", "MPTCP"]) {
            constant.0 = name;
        }
        let fastest = Features { constants, rdonly_cast: Some(7) };
        let helpers = fastest.with_fewer_socket_reads().unwrap();
        assert_eq!(
            helpers.constants[..4],
            [("TCP_SOCK", 1), ("ANY_SOCK", 1), ("SOCK_TYPE", 0), ("MPTCP", 1)]
        );
        assert_eq!(helpers.rdonly_cast, None);
        let none = helpers.with_fewer_socket_reads().unwrap();
        assert_eq!(none.constants[..4], [("TCP_SOCK", 0), ("ANY_SOCK", 0), ("SOCK_TYPE", 0), ("MPTCP", 1)]);
        assert!(fastest.reads_sockets() && helpers.reads_sockets() && !none.reads_sockets());
    }
}
