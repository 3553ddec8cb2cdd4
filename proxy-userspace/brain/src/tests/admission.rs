//! Namespaces with more entries than they may have.

use model::{
    Effect, Timestamp,
    cluster::ObjectName,
    state::{ExternalForwarding, ServiceKind},
};

use super::*;
use crate::{Brain, Query, explain};

/// A Service of a namespace with one frontend, created at `created` seconds.
fn named(namespace: &str, name: &str, created: i64) -> Service {
    let last = name.bytes().last().unwrap_or_default();
    Service {
        name: ServiceName::new(namespace, name),
        created: Some(Timestamp::from_micros(created * 1_000_000)),
        cluster_ips: vec![[10, 96, namespace.len() as u8, last].into()],
        ..service()
    }
}

/// Its slice with this many endpoints, and as many entries.
fn endpoints_of(service: &Service, count: u8) -> EndpointSlice {
    let endpoint =
        |it| Endpoint { node: Some(format!("n{}", 9 - it).into()), ..Endpoint::new([10, 244, 0, it].into()) };
    let ServiceName { namespace, name } = service.name.clone();
    let name = SliceName { namespace, name };
    EndpointSlice {
        name,
        service: service.name.clone(),
        ..slice((0..count).map(endpoint).collect::<Vec<_>>())
    }
}

fn brain(max_namespace_entries: u64, services: &[(&Service, u8)]) -> Brain {
    let mut brain = Brain::new(Options { max_namespace_entries, ..Options::default() });
    for (service, endpoints) in services {
        brain.cluster_mut().services.insert((*service).clone());
        brain.cluster_mut().set_slice(endpoints_of(service, *endpoints));
    }
    brain.start_serving("n1");
    brain.recompute();
    brain
}

fn served(brain: &Brain) -> Vec<String> {
    brain.state("n1").unwrap().services.keys().map(ToString::to_string).collect()
}

#[test]
fn of_a_namespace_with_too_many_entries_the_older_services_that_fit_are_served() {
    let [old, huge, new] = [named("a", "x", 1), named("a", "y", 2), named("a", "w", 3)];
    let other = named("bb", "z", 4);
    let mut brain = brain(10, &[(&old, 4), (&huge, 5), (&new, 4), (&other, 9)]);
    assert_eq!(served(&brain), ["a/w", "a/x", "bb/z"]);
    assert_eq!(brain.most_namespace_entries(), 16, "5 and 6 and 5");
    let rejected: Vec<_> = brain.rejections().iter().cloned().collect();
    assert_eq!(
        rejected.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [
            "Service a/y: its 6 entries (frontends, endpoints times ports) do not fit beside those of the older Services of \
             namespace a, which may have 10 (--max-namespace-entries)"
        ]
    );
    assert_eq!(
        rejected[0].effect,
        Effect::OverLimit { service: huge.name.clone(), node: Some("n5".into()) },
        "which reports it"
    );
    // An endpoint less, and it fits beside the oldest, whose younger one has no room then.
    brain.cluster_mut().set_slice(endpoints_of(&huge, 4));
    let changed = brain.recompute();
    assert_eq!((served(&brain), changed.len()), (vec!["a/x".into(), "a/y".into(), "bb/z".into()], 1));
    brain.cluster_mut().delete(&ObjectName::Service(old.name));
    brain.recompute();
    assert_eq!(served(&brain), ["a/w", "a/y", "bb/z"]);
    assert_eq!(brain.rejections().iter().count(), 0);
}

#[test]
fn ports_with_the_same_target_are_one_entry_per_endpoint() {
    let service = named("a", "x", 1);
    let mut brain = brain(10, &[(&service, 9)]);
    let mut slice = endpoints_of(&service, 9);
    let port =
        |name: &str, port| SlicePort { name: name.to_owned(), protocol: Protocol::Tcp, port: number(port) };
    slice.ports = vec![port("a", 8080), port("b", 8080)];
    brain.cluster_mut().set_slice(slice.clone());
    brain.recompute();
    assert_eq!(served(&brain), ["a/x"]);
    slice.ports = vec![port("a", 8080), port("b", 8081)];
    brain.cluster_mut().set_slice(slice);
    brain.recompute();
    assert_eq!(served(&brain), [""; 0]);
}

#[test]
fn what_does_not_fit_claims_nothing_but_its_cluster_ips() {
    let old = Service { external_ips: vec![[192, 0, 2, 1].into()], ..named("a", "x", 1) };
    let new = Service { external_ips: old.external_ips.clone(), ..named("bb", "y", 2) };
    let mut brain = brain(10, &[(&old, 4), (&new, 4)]);
    let lost = |brain: &Brain| {
        brain.state("n1").unwrap().services[&new.name].service.ports[0].conflicting_addresses.len()
    };
    assert_eq!(lost(&brain), 1);
    brain.cluster_mut().set_slice(endpoints_of(&old, 9));
    brain.recompute();
    assert_eq!((served(&brain), lost(&brain)), (vec!["bb/y".into()], 0));
    let options = Options { max_namespace_entries: 10, ..Options::default() };
    let query = Query::parse(&["node", "x.a:80"]).unwrap();
    let error = explain(brain.cluster_state(), &options, "n1", &query).unwrap_err();
    assert!(error.to_string().contains("Service a/x does not fit into its namespace"), "{error}");
}

#[test]
fn nobody_takes_over_the_cluster_ip_of_a_service_that_does_not_fit() {
    let old = named("a", "x", 2);
    let new = Service { external_ips: old.cluster_ips.clone(), ..named("bb", "y", 1) };
    let brain = brain(10, &[(&old, 10), (&new, 4)]);
    assert_eq!(served(&brain), ["bb/y"]);
    let state = &brain.state("n1").unwrap().services[&new.name];
    assert_eq!(state.service.ports[0].conflicting_addresses, old.cluster_ips);
    let rejected: Vec<_> = brain.rejections().iter().map(ToString::to_string).collect();
    assert!(
        rejected.iter().any(|it| it.starts_with("Service bb/y: ") && it.contains("Service a/x")),
        "{rejected:?}"
    );
    // Also at a port that it does not have.
    for port in [80, 81] {
        let to = format!("{}:{port}", old.cluster_ips[0]);
        let options = Options { max_namespace_entries: 10, ..Options::default() };
        let explained =
            explain(brain.cluster_state(), &options, "n1", &Query::parse(&["node", &to]).unwrap()).unwrap();
        assert!(explained.service.is_none() && explained.reason.contains("does not fit"), "{explained:?}");
    }
}

#[test]
fn the_rows_of_forwarded_services_count() {
    let mut service = named("a", "x", 1);
    service.kind = ServiceKind::LoadBalancer;
    service.load_balancer_ips = vec!["203.0.113.1".parse().unwrap()];
    let entries = |it: &Service| brain(1_000, &[(it, 4)]).most_namespace_entries();
    let translated = entries(&service);
    service.load_balancing.external_forwarding = Some(ExternalForwarding::Dsr);
    assert_eq!(entries(&service), translated + 1_024 / 64);
    // Without room for its rows it is translated.
    let without_rows = brain(translated, &[(&service, 4)]);
    let reasons: Vec<_> = without_rows.rejections().iter().map(ToString::to_string).collect();
    assert!(reasons[0].contains("the 16 entries of its rows do not fit"), "{reasons:?}");
    assert!(without_rows.rejections().iter().all(model::Rejected::is_served));
    let forwarded =
        |it: &Brain| it.state("n1").unwrap().services.values().map(|it| it.forwarded.len()).sum::<usize>();
    assert_eq!((served(&without_rows), forwarded(&without_rows)), (vec!["a/x".to_owned()], 0));
    let mut brain_ = brain(translated + 16, &[(&service, 4)]);
    assert_eq!((brain_.rejections().len(), forwarded(&brain_)), (0, 1));
    // An older one takes the room.
    let older = named("a", "w", 0);
    brain_.cluster_mut().services.insert(older);
    brain_.recompute();
    assert_eq!((served(&brain_).len(), forwarded(&brain_)), (2, 0));
    let refused = brain(translated - 1, &[(&service, 4)]);
    let reasons: Vec<_> = refused.rejections().iter().map(ToString::to_string).collect();
    assert!(
        reasons[0].contains("(frontends, endpoints times ports, rows of forwarding) do not fit"),
        "{reasons:?}"
    );
}
