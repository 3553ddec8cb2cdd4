//! Properties of states, for random Services, slices and histories.

use std::sync::Arc;

use brain::{Options, node_state};
use fuzz::{
    explanations,
    random_cluster::{NODES, apply_changes, service, slice},
};
use model::{
    Family,
    cluster::{ClusterState, EndpointSlice, Node, Service, SliceName},
    state::{NodeInfo, Scope, ServiceState, TrafficPolicy},
};
use proptest::{collection::vec, prelude::*};

fn some_bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..600)
}

/// A Service and slices, all of which are its own.
fn service_with_slices(bytes: &[u8]) -> (Service, Vec<EndpointSlice>) {
    let mut u = arbitrary::Unstructured::new(bytes);
    let service = service(&mut u).expect("missing bytes are zeroes");
    let mut slices = Vec::new();
    while let (false, Ok(it)) = (u.is_empty(), slice(&mut u)) {
        slices.push(EndpointSlice { service: service.name.clone(), ..it });
    }
    (service, slices)
}

fn state(service: &Service, slices: &[EndpointSlice]) -> Option<Arc<ServiceState>> {
    let mut cluster = ClusterState::default();
    cluster.nodes.insert(Node { name: "n1".into(), zone: Some("a".into()), info: NodeInfo::default() });
    cluster.services.insert(service.clone());
    for (n, slice) in slices.iter().enumerate() {
        let name = SliceName { namespace: "ns".into(), name: n.to_string().into() };
        cluster.set_slice(EndpointSlice { name, ..slice.clone() });
    }
    node_state(&cluster, "n1", &Options::default()).services.get(&service.name).cloned()
}

/// The slices, in reverse order, and so is everything in them.
fn reversed(slices: &[EndpointSlice]) -> Vec<EndpointSlice> {
    let mut slices = slices.to_vec();
    slices.reverse();
    for slice in &mut slices {
        slice.endpoints.reverse();
        slice.ports.reverse();
    }
    slices
}

/// The result of random changes.
fn cluster(bytes: &[u8]) -> ClusterState {
    let mut cluster = ClusterState::default();
    apply_changes(&mut cluster, bytes);
    cluster
}

proptest! {
    #[test]
    fn a_history_leads_to_the_states_of_the_pure_function(bytes in vec(any::<u8>(), 0..4_000)) {
        fuzz::brain::target(&bytes);
    }

    #[test]
    fn changes_of_endpoints_lead_to_the_states_of_the_pure_function(bytes in vec(any::<u8>(), 200..1_000)) {
        fuzz::brain::changes_of_endpoints(&bytes);
    }

    #[test]
    fn explanations_agree_with_the_state(bytes in vec(any::<u8>(), 0..4_000), external_ips: bool) {
        let (cluster, options) = (cluster(&bytes), Options { external_ips, ..Options::default() });
        for node in NODES {
            explanations::check(&cluster, &options, node, &node_state(&cluster, node, &options));
        }
    }

    #[test]
    fn the_order_changes_nothing(bytes in some_bytes()) {
        let (service, slices) = service_with_slices(&bytes);
        prop_assert_eq!(state(&service, &slices), state(&service, &reversed(&slices)));
    }

    #[test]
    fn splitting_slices_changes_nothing(bytes in some_bytes()) {
        let (service, slices) = service_with_slices(&bytes);
        let single = slices.iter().flat_map(|slice| {
            slice.endpoints.iter().map(|it| EndpointSlice { endpoints: vec![it.clone()], ..slice.clone() })
        });
        prop_assert_eq!(state(&service, &single.collect::<Vec<_>>()), state(&service, &slices));
    }

    #[test]
    fn policy_cluster_has_a_target_if_any_endpoint_could_serve(bytes in some_bytes()) {
        let (service, slices) = service_with_slices(&bytes);
        let service = Service { internal_policy: TrafficPolicy::Cluster, ..service };
        let Some(state) = state(&service, &slices) else { return Ok(()) };
        for (index, port) in state.service.ports.iter().enumerate() {
            for family in [Family::V4, Family::V6] {
                let has_target = state.targets(index, family, Scope::Internal).next().is_some();
                prop_assert_eq!(has_target, *port.has_any_endpoint.of(family));
            }
        }
    }
}
