//! Properties of the states that a brain computes, for random clusters.

use std::sync::Arc;

use arbitrary::Unstructured;
use brain::{Options, node_state};
use fuzz::{
    random_cluster::{NODES, change},
    wire::round_trip,
};
use model::{
    ServiceMetadata,
    cluster::ClusterState,
    state::{ExternalForwarding, Scopes, Service, ServiceState},
};
use proptest::{collection::vec, prelude::*};
use proxy_contract::localv1::EndpointScopes;

/// The Services of each node after random changes, where packets from outside are forwarded whole by default.
fn states(bytes: &[u8]) -> Vec<Arc<ServiceState>> {
    let mut u = Unstructured::new(bytes);
    let mut cluster = ClusterState::default();
    while let (false, Ok(change)) = (u.is_empty(), change(&mut u)) {
        cluster.apply([change].into());
    }
    let options = Options { external_forwarding: ExternalForwarding::Dsr, ..Options::default() };
    NODES.into_iter().flat_map(|it| node_state(&cluster, it, &options).services.into_values()).collect()
}

proptest! {
    #[test]
    fn a_round_trip_gives_the_same_state(bytes in vec(any::<u8>(), 0..4_000), note: String) {
        let labels = [("app".to_owned(), "web".to_owned())].into();
        let annotations = [("example.com/note".to_owned(), note)].into();
        let metadata = Arc::new(ServiceMetadata { labels, annotations });
        for state in states(&bytes) {
            round_trip(&state);
            let metadata = Some(Arc::clone(&metadata));
            let service = Arc::new(Service { metadata, ..Service::clone(&state.service) });
            round_trip(&ServiceState { service, ..ServiceState::clone(&state) });
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
