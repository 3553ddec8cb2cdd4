//! The dependencies of the client library.

#![expect(clippy::unwrap_used, reason = "a failed helper fails the test")]

use std::{collections::BTreeSet, process::Command};

/// The dependencies of a gRPC client, tonic-health for the choice of a brain, backon with its fastrand for the back-off, and
/// sha2 for the digests of what a client has.
const ALLOWED: &str = "
    anyhow async-trait atomic-waker backon base64 block-buffer bytes cfg-if const-oid cpufeatures crypto-common digest either
    equivalent fastrand fnv futures-channel futures-core futures-sink futures-task futures-util h2 hashbrown http http-body
    http-body-util httparse hybrid-array hyper hyper-timeout hyper-util indexmap itertools itoa libc mio once_cell
    percent-encoding pin-project pin-project-internal pin-project-lite proc-macro2 prost prost-derive proxy-contract quote sha2
    slab smallvec socket2 syn sync_wrapper thiserror thiserror-impl tokio tokio-stream tokio-util tonic tonic-health tonic-prost
    tower tower-layer tower-service tracing tracing-attributes tracing-core try-lock typenum unicode-ident want
";
const ALLOWED_FOR_TLS: &str = "
    getrandom log ring rustls rustls-pki-types rustls-webpki subtle tokio-macros tokio-rustls untrusted zeroize
";

#[test]
fn the_client_library_has_few_dependencies() {
    check(&[], ALLOWED);
}

const ALLOWED_FOR_CLAP: &str = "
    anstream anstyle anstyle-parse anstyle-query bitflags clap clap_builder clap_derive clap_lex colorchoice heck
    is_terminal_polyfill linux-raw-sys rustix strsim terminal_size utf8parse
";

#[test]
fn flags_add_only_clap() {
    check(&["--features", "clap"], &[ALLOWED, ALLOWED_FOR_CLAP].concat());
}

#[test]
fn mutual_tls_adds_few_dependencies() {
    check(&["--features", "tls"], &[ALLOWED, ALLOWED_FOR_TLS].concat());
}

#[track_caller]
fn check(features: &[&str], allowed: &str) {
    let output = Command::new(env!("CARGO"))
        .args("tree --offline --locked --package proxy-contract --edges normal --prefix none".split(' '))
        .args(["--target", "x86_64-unknown-linux-gnu", "--format", "{p}"])
        .args(features)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let found: BTreeSet<_> = text.lines().filter_map(|it| it.split(' ').next()).collect();
    let found: BTreeSet<_> = found.into_iter().filter(|it| !it.is_empty()).collect();
    let allowed: BTreeSet<_> = allowed.split_whitespace().collect();
    let more: Vec<_> = found.difference(&allowed).collect();
    assert!(more.is_empty(), "not in the list: {more:?}");
    assert!(found.contains("tonic"), "{text}");
}
