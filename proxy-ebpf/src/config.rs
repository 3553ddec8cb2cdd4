//! Read-only globals that user space sets when it loads the programs.
//!
//! The verifier knows their values, and removes the branches that they rule out.

/// Defines read-only globals, which are 0 unless user space sets them.
macro_rules! globals {
    ($($(#[$attribute:meta])* $name:ident: $type:ty;)*) => {$(
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        pub(crate) static $name: aya_ebpf::Global<$type> = aya_ebpf::Global::new(0);
    )*};
}
#[cfg(feature = "trace")]
pub(crate) use globals;

globals! {
    /// The levels of the cgroup hierarchy on which there may be excluded cgroups, one bit each.
    EXCLUDED_LEVELS: u32;
    /// Not zero if only sockets of the node's own network namespace are load-balanced.
    HOST_ONLY: u32;
    /// Not zero if the kernel has `bpf_set_retval` (5.18): a program may choose the errno of the system call it ends.
    SET_RETVAL: u32;
    /// The number of [`SLOTS`](crate::maps::SLOTS) minus one: the bits of a cookie that select its slot.
    SLOT_MASK: u32;
    /// The number of stripes of [`COUNTERS`](crate::maps::COUNTERS) minus one: the bits of a CPU's number that select its stripe.
    STRIPE_MASK: u32;
    /// The number of entries that [`OVERFLOW`](crate::maps::OVERFLOW) has room for.
    OVERFLOW_CAPACITY: u32;
    /// The UDP port of wrapped packets, in network byte order.
    FORWARDING_PORT: u32;
    /// Not zero if every decision takes long.
    #[cfg(feature = "fault-points")]
    SLOW: u32;
    /// Makes the random choices of each load of the programs, and of each node, different.
    SEED: u64;
    /// The cookie of the node's own network namespace; 0 if the kernel does not report it (before 5.14).
    HOST_NETNS: u64;
    /// How long an endpoint is ejected for the first time, in nanoseconds.
    EJECTION_TIME: u64;
    /// How long an endpoint is ejected at most, in nanoseconds.
    MAX_EJECTION_TIME: u64;
    /// Not zero if a program on the node may not bind a node port.
    PROTECT_NODE_PORTS: u32;
    /// Not zero if the kernel has `bpf_skc_to_mptcp_sock` (5.19).
    MPTCP: u32;
    /// Not zero if the kernel's own TCP clients keep the address that they were given: before 6.6, `kernel_connect` overwrote it
    /// with the backend's (Linux 0bdf399342c5), to which they reconnected forever.
    KERNEL_TCP: u32;
    /// Not zero if fields of a TCP socket such as [`KERN_SOCK_BIT`] can be read: the kernel has `bpf_skc_to_tcp_sock` (5.10), and type
    /// information that locates the bit.
    TCP_SOCK: u32;
    /// Not zero if fields of any socket such as [`KERN_SOCK_BIT`] can be read: the kernel has `bpf_probe_read_kernel` for these programs, and
    /// type information that locates the bit.
    ANY_SOCK: u32;
    /// The BTF id of `struct inet_sock`, which begins with `struct sock`, if any socket can be read by a cast to it; else 0.
    SOCK_TYPE: u32;
    /// The offset of the byte of `struct sock` that holds `sk_kern_sock` in this kernel.
    KERN_SOCK_BYTE: u32;
    /// The mask of `sk_kern_sock` in that byte: set for a socket of the kernel's own.
    KERN_SOCK_BIT: u32;
    /// The offset of the byte of `struct sock` that holds `SOCK_BINDPORT_LOCK` of `sk_userlocks` in this kernel.
    PORT_LOCK_BYTE: u32;
    /// The mask of `SOCK_BINDPORT_LOCK` in that byte: set for a socket whose program has bound it to a certain port.
    PORT_LOCK_BIT: u32;
    /// The offset of `uc_index` in `struct inet_sock`: the interface of `IP_UNICAST_IF`. 0 if it is not known.
    UNICAST_IF: u32;
    /// The offset of `tcp_mstamp` in `struct tcp_sock`: when a socket last sent or received, in microseconds of the monotonic clock. 0
    /// if programs that release sockets cannot read it.
    TCP_MSTAMP: u32;
    /// The offset of `pinet6` in `struct inet_sock`.
    PINET6: u32;
    /// The offset of `ucast_oif` in `struct ipv6_pinfo`: the interface of `IPV6_UNICAST_IF`. 0 if it is not known.
    UNICAST_IF6: u32;
}
