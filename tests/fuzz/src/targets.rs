//! Every target by its name, and those that are short: they call the crate that reads and check what it has read.

use std::{path::Path, sync::LazyLock};

use ::brain::{Brain, Options, node_state};
use admin::fuzzing::Pages;
use arbitrary::Unstructured;
use datapath_ebpf::fuzzing::{counters, generation, trace};
use kube_proxy_config::{FIELDS, File};
use model::{RequestedMetadata, cluster::ClusterState, state::NodeState};
use prost::Message as _;
use proxy_contract::{
    client::ClusterService,
    globalv1::{EndpointInfo, ServiceInfo},
};
use source::{
    file::parse,
    kube::fuzzing::{Messages, Reflectors},
};
use tokio::runtime::{Builder, Runtime};

use crate::{brain, compile, invariants, random_cluster::change, wire};

/// A target, with the name of its corpus.
type Target = (&'static str, fn(&[u8]));

pub const TARGETS: [Target; 14] = [
    ("api_list", api_list),
    ("api_watch", api_watch),
    ("brain", brain::target),
    ("certificates", certificates),
    // The differences that a client returns lead to the state that the operations of a brain make.
    ("change_sets", proxy_contract::client::fuzzing::change_sets),
    ("cluster", cluster),
    ("compile", compile::target),
    ("config", config),
    ("maps", maps),
    // What is read of a datagram of the kernel can be sent back as it came.
    ("netlink", netlink::fuzzing::datagram),
    ("nft_tables", nft_tables),
    ("pages", pages),
    ("parser", parser),
    ("wire", wire::target),
];

/// A runtime with a clock, for what needs one.
fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().build().expect("a runtime without IO")
}

/// A list has the same objects however it arrives. The first two bytes are the kind of its objects and the size of a fragment.
fn api_list(bytes: &[u8]) {
    let [kind, size, body @ ..] = bytes else { return };
    check_messages(|it| it.list(*kind, usize::from(*size) + 1, body));
}

/// An event changes something at most once, and an error in it takes one line. The first byte is the kind of the objects.
fn api_watch(bytes: &[u8]) {
    let [kind, body @ ..] = bytes else { return };
    check_messages(|it| it.watch(*kind, body));
}

thread_local! {
    static REFLECTORS: (Runtime, Reflectors) = {
        let runtime = runtime();
        let reflectors = {
            let _context = runtime.enter();
            Reflectors::new()
        };
        (runtime, reflectors)
    };
}

/// Checks messages as users read them: errors as they are logged.
fn check_messages(call: impl FnOnce(&Reflectors) -> Messages) {
    REFLECTORS.with(|(runtime, reflectors)| {
        let _context = runtime.enter();
        let messages = call(reflectors);
        invariants::rejected(&messages.rejected);
        messages.errors.iter().for_each(|it| invariants::line(&model::escaped_line(it)));
    });
}

/// Only names in a peer's certificate permit something.
fn certificates(bytes: &[u8]) {
    for message in grpc_server::fuzzing::certificate(bytes) {
        assert!(!message.is_empty() && !message.chars().any(char::is_control), "one line: {message:?}");
    }
}

/// A Service and its endpoints of another brain that can be decoded are a cluster state, from which a node state can be derived.
///
/// The input is a sequence of length-delimited messages: a Service, then endpoints.
fn cluster(mut bytes: &[u8]) {
    let Ok(service) = ServiceInfo::decode_length_delimited(&mut bytes) else { return };
    let mut message = ClusterService { service, ..ClusterService::default() };
    while let Ok(endpoint) = EndpointInfo::decode_length_delimited(&mut bytes) {
        let key = format!("{}|{}", endpoint.source_name, message.endpoints.len());
        message.endpoints.insert(key.into(), endpoint.into());
        if bytes.is_empty() {
            break;
        }
    }
    let decoded = ::wire::cluster::service_with_slices(&message, &RequestedMetadata::everything());
    invariants::rejected(&decoded.rejected);
    let Some((service, slices)) = decoded.value else { return };
    let mut cluster = ClusterState::default();
    for slice in slices {
        assert_eq!(slice.service, service.name, "a slice belongs to its Service");
        cluster.set_slice(slice);
    }
    cluster.services.insert(service);
    invariants::state(&node_state(&cluster, "n1", &Options::default()));
}

/// A KubeProxyConfiguration is refused in a line, or each value that it sets has a known field, and each remark takes a line.
fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match File::parse(Path::new("file"), text, |it| it != "nft_masquerade_bit") {
        Err(error) => invariants::line(&error.to_string()),
        Ok(file) => {
            file.remarks.iter().for_each(|it| invariants::line(it));
            for (id, values) in file.defaults() {
                let field = file.field_of(id).expect("a value has a field");
                let known = ["kind", "mode"].contains(&field) || FIELDS.iter().any(|it| it.path == field);
                assert!(known && !values.is_empty(), "{id} of {field}: {values:?}");
            }
        }
    }
}

/// Whatever was left in pinned maps can be described, and no counter gets two owners. The first byte is the kind of the maps.
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
    static PAGES: (Runtime, Pages) = (runtime(), Pages::default());
}

/// The server of the pages answers a client in HTTP, if at all, and it is never its own error. The first byte is the group of
/// pages.
fn pages(bytes: &[u8]) {
    let [group, request @ ..] = bytes else { return };
    PAGES.with(|(runtime, pages)| runtime.block_on(pages.send(*group, request)));
}

/// A manifest is accepted as a whole or not at all, and its objects lead to one state, computed incrementally or at once.
fn parser(bytes: &[u8]) {
    let parsed = match parse(bytes) {
        Ok(parsed) => parsed,
        Err(error) => return invariants::line(&error.to_string()),
    };
    assert_eq!(parse(bytes).as_ref(), Ok(&parsed), "parsing is deterministic");
    invariants::rejected(&parsed.rejected);
    let (mut brain, mut cluster) = (Brain::new(Options::default()), ClusterState::default());
    brain.start_serving("n1");
    for (_, object) in parsed.objects {
        brain.cluster_mut().set(object.clone());
        cluster.set(object);
    }
    brain.recompute();
    let state = node_state(&cluster, "n1", &Options::default());
    assert_eq!(brain.state("n1"), Some(&state), "incremental and pure results are equal");
    invariants::state(&state);
}
