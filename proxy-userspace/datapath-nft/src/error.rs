//! What can go wrong between the backend and nftables, and what to do about it.

use std::io;

use nix::errno::Errno;

/// What is read first: which tables there are, with their comments.
pub(super) const TABLES: &str = "comments";

/// Why the tables could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no way to nftables.
    #[error("cannot talk to nftables{}", remedy(.0))]
    Open(#[source] io::Error),
    /// The kernel does not say what is in a table.
    #[error("cannot read the {what} of our tables{}", remedy(&(*errno).into()))]
    Read {
        /// What was to be read.
        what: &'static str,
        /// Why not.
        #[source]
        errno: Errno,
    },
    /// The kernel does not list its flows, or does not let us end one.
    #[error(
        "flows to endpoints that are gone cannot be ended (CONFIG_NF_CT_NETLINK, module nf_conntrack_netlink)"
    )]
    Flows(#[source] Errno),
    /// The kernel lacks what our tables need, in both families.
    #[error("this kernel cannot translate packets")]
    Incapable(#[source] Box<Self>),
    /// The kernel refuses a change. Nothing of it is in force.
    #[error("the kernel refuses {what}{}", remedy(&(*errno).into()))]
    Refused {
        /// The part of it that the kernel refuses.
        what: String,
        /// Why.
        #[source]
        errno: Errno,
    },
}

/// What helps against an errno, where we know.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => " (run as root, or with CAP_NET_ADMIN)",
        Some(libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT | libc::EOPNOTSUPP) => {
            " (the kernel has no nftables: load the module nf_tables, or use a kernel with CONFIG_NF_TABLES)"
        }
        Some(libc::ENOENT) => {
            " (a module of nftables is missing: nft_chain_nat, nft_nat, nft_masq, nft_reject, nft_numgen, nft_fib_ipv4 \
             and nft_fib_ipv6 are needed, from Linux 5.10)"
        }
        Some(libc::ENOMEM | libc::ENOBUFS) => " (the kernel has no memory for it)",
        Some(libc::EINTR) => " (they change faster than they can be read: try again when less changes)",
        _ => "",
    }
}

impl Error {
    /// Whether there can be no tables of ours, since the kernel has no nftables at all.
    pub fn is_for_want_of_nftables(&self) -> bool {
        match self {
            Self::Open(error) => error.raw_os_error() == Some(libc::EPROTONOSUPPORT),
            // The answer to a question about a part of netfilter that is not there.
            Self::Read { what: TABLES, errno } => *errno == Errno::EINVAL,
            _ => false,
        }
    }

    /// Whether the kernel may lack something, rather than that something is wrong. Only of tables that are written anew: in
    /// any other change, what is not there may be what somebody else has taken away.
    pub(super) fn is_for_want_of_something(&self) -> bool {
        let want = [Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT, Errno::EOPNOTSUPP, Errno::ENOENT];
        matches!(self, Self::Refused { errno, .. } if want.contains(errno))
    }
}
