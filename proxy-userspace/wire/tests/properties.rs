//! Properties of the states that a brain computes, for random clusters.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use brain::{Options, node_state};
use fuzz::{
    random_cluster::{NODES, apply_changes},
    wire::round_trip,
};
use ipnet::IpNet;
use model::{
    ServiceMetadata, Timestamp,
    address::canonical_range,
    cluster::ClusterState,
    state::{ClientIpAffinity, ExternalForwarding, NodeShare, Scopes, ServiceState, TargetPort},
};
use proptest::{
    collection::{btree_map, vec},
    prelude::*,
};
use proxy_contract::localv1::EndpointScopes;

/// The Services of each node after random changes, where packets from outside are forwarded whole by default.
fn states(bytes: &[u8]) -> Vec<Arc<ServiceState>> {
    let mut cluster = ClusterState::default();
    apply_changes(&mut cluster, bytes);
    let options = Options { external_forwarding: ExternalForwarding::Dsr, ..Options::default() };
    NODES.into_iter().flat_map(|it| node_state(&cluster, it, &options).services.into_values()).collect()
}

proptest! {
    #[test]
    fn a_round_trip_gives_the_same_state(
        bytes in vec(any::<u8>(), 0..4_000),
        note: String,
        first_port in 1_u16..=65_533,
        seconds in 1_u32..=0x7fff_ffff,
        micros: i64,
        ranges in vec((any::<IpAddr>(), 0_u8..=32), 0..3),
        nodes in btree_map("[a-z]{1,3}(\\.[a-z])?", 1_u32.., 1..4),
    ) {
        let labels = [("app".to_owned(), "web".to_owned())].into();
        let annotations = [("example.com/note".to_owned(), note)].into();
        let metadata = Arc::new(ServiceMetadata { labels, annotations });
        let timeout_seconds = NonZeroU32::new(seconds).unwrap();
        let port = |index: u16| NonZeroU16::new(first_port + index).unwrap();
        let ranges: BTreeSet<_> =
            ranges.into_iter().map(|(ip, length)| canonical_range(IpNet::new(ip, length).unwrap())).collect();
        let share = |(node, endpoints): (String, _)| NodeShare { node: node.into(), endpoints };
        let nodes: Arc<[_]> = nodes.into_iter().map(share).collect();
        for state in states(&bytes) {
            round_trip(&state);
            // The random clusters have few values of these fields.
            let mut state = ServiceState::clone(&state);
            let service = Arc::make_mut(&mut state.service);
            service.metadata = Some(Arc::clone(&metadata));
            service.affinity = Some(ClientIpAffinity { timeout_seconds });
            service.source_ranges = ranges.iter().copied().collect();
            service.health_check_node_port = Some(port(0));
            for (index, it) in (0..).zip(&mut service.ports) {
                (it.port, it.node_port) = (port(index), Some(port(2 - index)));
                if let TargetPort::Number(it) = &mut it.target_port {
                    *it = port(0);
                }
            }
            for it in state.endpoints.iter_mut().flat_map(|it| Arc::make_mut(&mut Arc::make_mut(it).ports)) {
                it.port = port(it.index);
            }
            for it in Arc::make_mut(&mut state.forwarded) {
                it.nodes = Arc::clone(&nodes);
            }
            state.trigger_time = Some(Timestamp::from_micros(micros));
            round_trip(&state);
        }
    }

    #[test]
    fn the_client_library_finds_the_same_ports(bytes in vec(any::<u8>(), 0..4_000)) {
        for state in states(&bytes) {
            let message = wire::service(&state.service);
            for it in &state.endpoints {
                let sent = wire::endpoint(&state.service, it);
                for index in 0..message.ports.len() {
                    let expected = it.ports.iter().find(|it| usize::from(it.index) == index);
                    prop_assert_eq!(sent.port(&message, index), expected.map(|it| it.port.get()));
                    if let Some(it) = expected {
                        let Scopes { internal, external, cluster } = it.scopes;
                        let scopes = EndpointScopes { internal, external, cluster: Some(cluster) };
                        prop_assert_eq!(sent.scopes_at(&message, index), scopes);
                    }
                }
            }
        }
    }
}
