//! Arbitrary bytes as a datagram of the kernel.

/// What is read can be sent back as it came.
pub fn target(bytes: &[u8]) {
    netlink::fuzzing::datagram(bytes);
}
