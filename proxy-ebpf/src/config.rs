//! Read-only globals that user space sets when it loads the programs.
//!
//! The verifier knows their values, and removes the branches that they rule out.

use aya_ebpf::Global;

/// The levels of the cgroup hierarchy on which there may be excluded cgroups, one bit each.
#[unsafe(no_mangle)]
pub(crate) static EXCLUDED_LEVELS: Global<u32> = Global::new(0);

/// Not zero if only sockets of the node's own network namespace are load-balanced.
#[unsafe(no_mangle)]
pub(crate) static HOST_ONLY: Global<u32> = Global::new(0);

/// Not zero if the kernel has `bpf_set_retval` (5.18): a program may choose the errno of the system call it ends.
#[unsafe(no_mangle)]
pub(crate) static SET_RETVAL: Global<u32> = Global::new(0);

/// The number of [`SLOTS`](crate::maps::SLOTS) minus one: the bits of a cookie that select its slot.
#[unsafe(no_mangle)]
pub(crate) static SLOT_MASK: Global<u32> = Global::new(0);

/// The number of stripes of [`COUNTERS`](crate::maps::COUNTERS) minus one: the bits of a CPU's number that select its stripe.
#[unsafe(no_mangle)]
pub(crate) static STRIPE_MASK: Global<u32> = Global::new(0);

/// The number of entries that [`OVERFLOW`](crate::maps::OVERFLOW) has room for.
#[unsafe(no_mangle)]
pub(crate) static OVERFLOW_CAPACITY: Global<u32> = Global::new(0);

/// The UDP port of wrapped packets, in network byte order.
#[unsafe(no_mangle)]
pub(crate) static FORWARDING_PORT: Global<u32> = Global::new(0);

/// Not zero if every decision takes long.
#[cfg(feature = "fault-points")]
#[unsafe(no_mangle)]
pub(crate) static SLOW: Global<u32> = Global::new(0);

/// Makes the random choices of each load of the programs, and of each node, different.
#[unsafe(no_mangle)]
pub(crate) static SEED: Global<u64> = Global::new(0);

/// The cookie of the node's own network namespace; 0 if the kernel does not report it (before 5.14).
#[unsafe(no_mangle)]
pub(crate) static HOST_NETNS: Global<u64> = Global::new(0);

/// How long an endpoint is ejected for the first time, in nanoseconds.
#[unsafe(no_mangle)]
pub(crate) static EJECTION_TIME: Global<u64> = Global::new(0);

/// How long an endpoint is ejected at most, in nanoseconds.
#[unsafe(no_mangle)]
pub(crate) static MAX_EJECTION_TIME: Global<u64> = Global::new(0);

/// Not zero if a program on the node may not bind a node port.
#[unsafe(no_mangle)]
pub(crate) static PROTECT_NODE_PORTS: Global<u32> = Global::new(0);

/// Not zero if the kernel has `bpf_skc_to_mptcp_sock` (5.19).
#[unsafe(no_mangle)]
pub(crate) static MPTCP: Global<u32> = Global::new(0);

/// Not zero if the kernel's own TCP clients keep the address that they were given: before 6.6, `kernel_connect` overwrote it
/// with the backend's (Linux 0bdf399342c5), to which they reconnected for ever.
#[unsafe(no_mangle)]
pub(crate) static KERNEL_TCP: Global<u32> = Global::new(0);

/// Not zero if fields of a TCP socket such as [`KERN_SOCK_BIT`] can be read: the kernel has `bpf_skc_to_tcp_sock` (5.10), and type
/// information that locates the bit.
#[unsafe(no_mangle)]
pub(crate) static TCP_SOCK: Global<u32> = Global::new(0);

/// Not zero if fields of any socket such as [`KERN_SOCK_BIT`] can be read: the kernel has `bpf_probe_read_kernel` for these programs, and
/// type information that locates the bit.
#[unsafe(no_mangle)]
pub(crate) static ANY_SOCK: Global<u32> = Global::new(0);

/// The BTF id of `struct inet_sock`, which begins with `struct sock`, if any socket can be read by a cast to it; else 0.
#[unsafe(no_mangle)]
pub(crate) static SOCK_TYPE: Global<u32> = Global::new(0);

/// The offset of the byte of `struct sock` that holds `sk_kern_sock` in this kernel.
#[unsafe(no_mangle)]
pub(crate) static KERN_SOCK_BYTE: Global<u32> = Global::new(0);

/// The mask of `sk_kern_sock` in that byte: set for a socket of the kernel's own.
#[unsafe(no_mangle)]
pub(crate) static KERN_SOCK_BIT: Global<u32> = Global::new(0);

/// The offset of the byte of `struct sock` that holds `SOCK_BINDPORT_LOCK` of `sk_userlocks` in this kernel.
#[unsafe(no_mangle)]
pub(crate) static PORT_LOCK_BYTE: Global<u32> = Global::new(0);

/// The mask of `SOCK_BINDPORT_LOCK` in that byte: set for a socket whose program has bound it to a certain port.
#[unsafe(no_mangle)]
pub(crate) static PORT_LOCK_BIT: Global<u32> = Global::new(0);

/// The offset of `uc_index` in `struct inet_sock`: the interface of `IP_UNICAST_IF`. 0 if it is not known.
#[unsafe(no_mangle)]
pub(crate) static UNICAST_IF: Global<u32> = Global::new(0);

/// The offset of `tcp_mstamp` in `struct tcp_sock`: when a socket last sent or received, in microseconds of the monotonic clock. 0
/// if programs that release sockets cannot read it.
#[unsafe(no_mangle)]
pub(crate) static TCP_MSTAMP: Global<u32> = Global::new(0);

/// The offset of `pinet6` in `struct inet_sock`.
#[unsafe(no_mangle)]
pub(crate) static PINET6: Global<u32> = Global::new(0);

/// The offset of `ucast_oif` in `struct ipv6_pinfo`: the interface of `IPV6_UNICAST_IF`. 0 if it is not known.
#[unsafe(no_mangle)]
pub(crate) static UNICAST_IF6: Global<u32> = Global::new(0);
