//! Properties that hold for every cluster state.

use std::collections::BTreeSet;

use model::state::Scopes;
use proptest::{collection::vec, option, prelude::*, sample::select};

use super::*;

fn some_endpoint(family: Family) -> impl Strategy<Value = Endpoint> {
    let conditions = any::<(bool, bool, bool)>();
    let hints = (vec(select(vec!["n1", "n2"]), 0..2), vec(select(vec!["a", "b"]), 0..2));
    let node = option::of(select(vec!["n1", "n2"]));
    let pod = option::of(select(vec!["p", "q"]));
    (0..4, conditions, node, pod, select(vec!["", "h"]), hints).prop_map(
        move |(last, (ready, serving, terminating), node, pod, hostname, hints)| {
            let address = match family {
                Family::V4 => format!("10.1.0.{last}"),
                Family::V6 => format!("fd00:1::{last}"),
            };
            Endpoint {
                address: address.parse().unwrap(),
                conditions: Conditions { ready, serving, terminating },
                node: node.map(Into::into),
                pod: pod.map(Into::into),
                hostname: hostname.into(),
                node_hints: hints.0.into_iter().map(Into::into).collect(),
                zone_hints: hints.1.into_iter().map(Into::into).collect(),
            }
        },
    )
}

pub(super) fn some_slice() -> impl Strategy<Value = EndpointSlice> {
    let ports = vec((select(vec!["", "b"]), select(vec![8080, 9090])), 0..3);
    let family = select(vec![Family::V4, Family::V6]);
    (family, ports, 0..9).prop_flat_map(|(family, ports, name)| {
        vec(some_endpoint(family), 0..5).prop_map(move |endpoints| {
            let ports = ports.iter().map(|(name, port)| SlicePort {
                name: (*name).into(),
                protocol: if *name == "b" { Protocol::Udp } else { Protocol::Tcp },
                port: number(*port),
            });
            let slice = slice_named(&format!("web-{name}"), family, endpoints);
            EndpointSlice { ports: ports.collect(), ..slice }
        })
    })
}

pub(super) fn some_service() -> impl Strategy<Value = Service> {
    any::<(bool, bool, bool)>().prop_map(|(outside, internal, external)| {
        let mut service = if outside { with_node_port() } else { service() };
        service.ports.push(service_port("b", Protocol::Udp, 81));
        let policy = |local| if local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
        Service { internal_policy: policy(internal), external_policy: policy(external), ..service }
    })
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

proptest! {
    #[test]
    fn the_order_changes_nothing(service in some_service(), slices in vec(some_slice(), 0..5)) {
        prop_assert_eq!(state(&service, &slices), state(&service, &reversed(&slices)));
    }

    #[test]
    fn splitting_slices_changes_nothing(service in some_service(), slices in vec(some_slice(), 0..5)) {
        let single = slices.iter().flat_map(|slice| {
            slice.endpoints.iter().map(|it| EndpointSlice { endpoints: vec![it.clone()], ..slice.clone() })
        });
        prop_assert_eq!(state(&service, &single.collect::<Vec<_>>()), state(&service, &slices));
    }

    #[test]
    fn every_endpoint_has_a_scope_and_a_unique_key(
        service in some_service(),
        slices in vec(some_slice(), 0..5),
    ) {
        let state = state(&service, &slices);
        let keys: BTreeSet<_> = state.endpoints.iter().map(|it| &it.key).collect();
        prop_assert_eq!(keys.len(), state.endpoints.len());
        prop_assert!(state.endpoints.is_sorted_by_key(|it| &it.key));
        for it in &state.endpoints {
            prop_assert!(it.v4.is_some() || it.v6.is_some());
            prop_assert!(!it.ports.is_empty() && it.ports.is_sorted_by(|a, b| a.index < b.index));
            prop_assert!(it.ports.iter().all(|it| it.scopes != Scopes::default()));
        }
    }

    #[test]
    fn policy_cluster_has_a_target_if_any_endpoint_could_serve(
        slices in vec(some_slice(), 0..5),
    ) {
        let state = state(&service(), &slices);
        for family in [Family::V4, Family::V6] {
            let some = state.targets(0, family, Scope::Internal).next().is_some();
            prop_assert_eq!(some, *state.service.ports[0].has_any_endpoint.of(family));
        }
    }
}
