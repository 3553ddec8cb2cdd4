//! Arbitrary bytes as the contents of pinned maps.

use datapath_ebpf::fuzzing::{counters, generation, trace};

/// Whatever an earlier process or another program has left: it can be described, and no counter gets two owners. The first byte
/// is the kind of the maps.
pub fn target(bytes: &[u8]) {
    let [kind, rest @ ..] = bytes else { return };
    match kind % 3 {
        0 => generation(rest),
        1 => trace(rest),
        _ => counters(rest),
    }
}
