//! Entry point of the fuzz targets: a peer with an arbitrary certificate.

use std::collections::BTreeSet;

use super::authz::Peer;

const ALLOWED: &str = "brain";

/// A peer with a certificate gets what its names permit: the state of its node, and the cluster's if it is allowed. Returns
/// the messages to a peer that gets neither.
pub fn certificate(bytes: &[u8]) -> Vec<String> {
    let allowed = Peer::certified(bytes, &BTreeSet::from([ALLOWED.to_owned()]));
    let unlisted = Peer::certified(bytes, &BTreeSet::new());
    let denied = unlisted.authorize_cluster().expect_err("no name is on an empty allow-list");
    assert!(unlisted.authorize_node("").is_err(), "no certificate names an empty node");
    if allowed.authorize_cluster().is_ok() {
        assert!(contains(bytes, ALLOWED), "the certificate has the name");
        assert!(allowed.authorize_node("any").is_ok());
    }
    let node = unlisted.authorize_node("n1");
    assert!(node.is_err() || contains(&bytes.to_ascii_lowercase(), "n1"), "the certificate names the node");
    [Some(denied), node.err()].into_iter().flatten().map(|it| it.message().to_owned()).collect()
}

fn contains(bytes: &[u8], name: &str) -> bool {
    bytes.windows(name.len()).any(|it| it == name.as_bytes())
}
