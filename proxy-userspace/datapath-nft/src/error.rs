//! Errors of nftables, with remedies.

use std::io;

use nix::errno::Errno;

/// The subject of the first read.
pub(super) const TABLES: &str = "comments";
/// How many destinations a trace of packets may have: every packet is compared with each.
pub(super) const MAX_DESTINATIONS: usize = 1024;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open a netlink socket to nftables{}", remedy(.0))]
    Open(#[source] io::Error),
    #[error("cannot list the {what} of our nftables tables{}", remedy(&(*errno).into()))]
    Read {
        what: &'static str,
        #[source]
        errno: Errno,
    },
    #[error(
        "cannot delete conntrack entries to removed endpoints (needs CONFIG_NF_CT_NETLINK, module nf_conntrack_netlink)"
    )]
    Flows(#[source] Errno),
    /// The kernel lacks a feature that our tables need, in both families.
    #[error("this kernel lacks features for the packet path")]
    Incapable(#[source] Box<Self>),
    /// The kernel refused a transaction. Nothing of it took effect.
    #[error("the kernel refused {what}{}", remedy(&(*errno).into()))]
    Refused {
        what: String,
        #[source]
        errno: Errno,
    },
    #[error("{0} addresses are too many to follow packets to: at most {max}; use --to", max = MAX_DESTINATIONS)]
    TooManyTracedDestinations(usize),
    #[error("cannot receive the kernel's reports about packets")]
    Trace(#[source] Errno),
}

/// What to do about an errno, where that is known.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            " (run as root, or with CAP_NET_ADMIN; only a running proxy itself can change its tables)"
        }
        Some(libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT | libc::EOPNOTSUPP) => {
            " (the kernel has no nftables: load the module nf_tables, or use a kernel with CONFIG_NF_TABLES)"
        }
        Some(libc::ENOENT) => {
            " (a module of nftables is missing: nft_chain_nat, nft_nat, nft_masq, nft_reject, nft_numgen, nft_fib_ipv4 \
             and nft_fib_ipv6 are needed, from Linux 5.10, and nft_socket for connections that are not tracked)"
        }
        Some(libc::ENOMEM | libc::ENOBUFS) => " (out of kernel memory)",
        Some(libc::EMSGSIZE) => {
            " (a process in a user namespace may send no more at a time than the host's sysctl net.core.wmem_max allows: raise it, \
             such as to 67108864)"
        }
        Some(libc::EINTR) => " (they change faster than they can be listed: try again)",
        _ => "",
    }
}

impl Error {
    /// Whether the kernel has no nftables, so that there can be no tables.
    pub fn is_nftables_missing(&self) -> bool {
        match self {
            Self::Open(error) => error.raw_os_error() == Some(libc::EPROTONOSUPPORT),
            // The answer of nfnetlink for a subsystem that does not exist.
            Self::Read { what: TABLES, errno } => *errno == Errno::EINVAL,
            _ => false,
        }
    }

    /// Whether this process may not change the tables, or another one owns them.
    pub(super) fn is_denied(&self) -> bool {
        matches!(self, Self::Refused { errno: Errno::EPERM, .. })
    }

    /// Whether the kernel may lack a feature. Meaningful only if the tables were written in full: in a partial change, a missing
    /// object may have been deleted by others.
    pub(super) fn is_feature_missing(&self) -> bool {
        let want = [Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT, Errno::EOPNOTSUPP, Errno::ENOENT];
        matches!(self, Self::Refused { errno, .. } if want.contains(errno))
    }
}
