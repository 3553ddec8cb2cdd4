//! Every target by its name, and those that need little more than a call of the crate that reads.

use std::{path::Path, sync::LazyLock};

use admin::fuzzing::Pages;
use arbitrary::Unstructured;
use datapath_ebpf::fuzzing::{counters, generation, trace};
use kube_proxy_config::{FIELDS, File};
use model::{cluster::ClusterState, state::NodeState};
use tokio::runtime::{Builder, Runtime};

use crate::{api, brain, cluster, compile, invariants, parser, random_cluster::change, wire};

/// A target, with the name of its corpus.
type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [Target; 14] = [
    ("api_list", api::list),
    ("api_watch", api::watch),
    ("brain", brain::target),
    ("certificates", certificates),
    // The differences that a client returns lead to the state that the operations of a brain make.
    ("change_sets", proxy_contract::client::fuzzing::change_sets),
    ("cluster", cluster::target),
    ("compile", compile::target),
    ("config", config),
    ("maps", maps),
    // What is read of a datagram of the kernel can be sent back as it came.
    ("netlink", netlink::fuzzing::datagram),
    ("nft_tables", nft_tables),
    ("pages", pages),
    ("parser", parser::target),
    ("wire", wire::target),
];

/// Only names in a peer's certificate permit something.
fn certificates(bytes: &[u8]) {
    for message in grpc_server::fuzzing::certificate(bytes) {
        assert!(!message.is_empty() && !message.chars().any(char::is_control), "one line: {message:?}");
    }
}

/// A KubeProxyConfiguration is refused in a line, or every value of it is that of a flag, which its field is named for, or
/// remarked on.
fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match File::parse(Path::new("file"), text, |it| it != "nft_masquerade_bit") {
        Err(error) => invariants::line(&error.to_string()),
        Ok(file) => {
            file.remarks().for_each(invariants::line);
            for (id, values) in file.defaults() {
                let field = file.field_of(id).expect("a value has a field");
                let known = ["kind", "mode"].contains(&field) || FIELDS.iter().any(|it| it.path == field);
                assert!(known && !values.is_empty(), "{id} of {field}: {values:?}");
            }
        }
    }
}

/// Whatever an earlier process or another program has left in pinned maps: it can be described, and no counter gets two owners.
/// The first byte is the kind of the maps.
fn maps(bytes: &[u8]) {
    let [kind, rest @ ..] = bytes else { return };
    match kind % 3 {
        0 => generation(rest),
        1 => trace(rest),
        _ => counters(rest),
    }
}

/// A state with some Services, with and without session affinity.
static STATE: LazyLock<NodeState> = LazyLock::new(|| {
    let mut rng = fastrand::Rng::with_seed(7);
    let bytes: Vec<u8> = (0..16_000).map(|_| rng.u8(..)).collect();
    let (mut u, mut cluster) = (Unstructured::new(&bytes), ClusterState::default());
    (0..60).map_while(|_| change(&mut u).ok()).for_each(|it| cluster.apply([it].into()));
    compile::state(&cluster)
});

/// Whatever the elements of nftables that a process finds at its start, they mean after that what the state means.
fn nft_tables(bytes: &[u8]) {
    datapath_nft::fuzzing::tables(bytes, &STATE);
}

thread_local! {
    static PAGES: (Runtime, Pages) = {
        let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime without IO");
        (runtime, Pages::default())
    };
}

/// The server of the pages answers a client in HTTP, if at all, and it is never its own error. The first byte is the group of
/// pages.
fn pages(bytes: &[u8]) {
    let [group, request @ ..] = bytes else { return };
    PAGES.with(|(runtime, pages)| runtime.block_on(pages.send(*group, request)));
}
