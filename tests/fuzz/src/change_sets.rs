//! Arbitrary bytes as the operations that a brain sends to its clients.

/// The differences that a client returns lead to the state that the operations make.
pub fn target(bytes: &[u8]) {
    proxy_contract::client::fuzzing::change_sets(bytes);
}
