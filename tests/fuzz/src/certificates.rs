//! Arbitrary bytes as a peer's certificate.

use grpc_server::fuzzing::certificate;

/// Only names in a certificate permit something.
pub fn target(bytes: &[u8]) {
    for message in certificate(bytes) {
        assert!(!message.is_empty() && !message.chars().any(char::is_control), "one line: {message:?}");
    }
}
