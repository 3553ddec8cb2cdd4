//! Several Services that claim the same frontend.

use std::net::IpAddr;

use model::Timestamp;

use super::*;
use crate::Brain;

/// A Service with one IPv4 cluster IP and port 80, created at `created` seconds.
fn named(name: &str, address: &str, created: Option<i64>) -> Service {
    Service {
        name: ServiceName::new("ns", name),
        created: created.map(|it| Timestamp::from_micros(it * 1_000_000)),
        cluster_ips: vec![address.parse().unwrap()],
        ..service()
    }
}

fn brain(services: impl IntoIterator<Item = Service>) -> Brain {
    let mut brain = Brain::new(Options::default());
    for it in services {
        brain.set_service(it);
    }
    brain.start_serving("n1");
    brain.recompute();
    brain
}

/// The addresses that each port of a Service has lost.
fn lost(brain: &Brain, name: &str) -> Vec<Vec<IpAddr>> {
    let state = &brain.state("n1").unwrap().services[&ServiceName::new("ns", name)];
    state.service.ports.iter().map(|it| it.conflicting_addresses.clone()).collect()
}

fn rejected_items(brain: &Brain) -> Vec<String> {
    brain.rejected().map(|it| it.item).collect()
}

const ONE: &str = "10.96.0.1";

#[track_caller]
fn check_winner(a: Option<i64>, b: Option<i64>, winner: &str) {
    let brain = brain([named("a", ONE, a), named("b", ONE, b)]);
    let loser = if winner == "a" { "b" } else { "a" };
    assert_eq!(lost(&brain, winner), [vec![]; 1] as [Vec<IpAddr>; 1]);
    assert_eq!(lost(&brain, loser), [[ONE.parse::<IpAddr>().unwrap()]]);
    assert_eq!(rejected_items(&brain), [format!("Service ns/{loser}: 10.96.0.1:80/TCP")]);
}

#[test]
fn the_older_service_wins() {
    check_winner(Some(1), Some(2), "a");
    check_winner(Some(2), Some(1), "b");
    check_winner(None, Some(2), "b");
}

#[test]
fn of_services_of_the_same_age_the_first_by_name_wins() {
    check_winner(Some(1), Some(1), "a");
    check_winner(None, None, "a");
}

#[test]
fn the_loser_gets_the_address_when_the_winner_is_deleted() {
    let mut brain = brain([named("a", ONE, Some(2)), named("b", ONE, Some(1))]);
    brain.delete_service(&ServiceName::new("ns", "b"));
    assert_eq!(brain.recompute().len(), 1);
    assert!(lost(&brain, "a").concat().is_empty() && rejected_items(&brain).is_empty());
    brain.set_service(named("b", ONE, Some(1)));
    brain.recompute();
    assert_eq!(rejected_items(&brain), ["Service ns/a: 10.96.0.1:80/TCP"]);
    brain.set_service(named("b", "10.96.0.2", Some(1)));
    brain.recompute();
    assert!(lost(&brain, "a").concat().is_empty() && rejected_items(&brain).is_empty());
}

#[test]
fn an_external_ip_does_not_take_over_a_cluster_ip() {
    let mut attacker = named("a", "10.96.0.2", Some(1));
    attacker.external_ips = vec![ONE.parse().unwrap()];
    let brain = brain([attacker, named("b", ONE, Some(2))]);
    assert_eq!(rejected_items(&brain), ["Service ns/a: 10.96.0.1:80/TCP"]);
    assert!(lost(&brain, "b").concat().is_empty());
}

#[test]
fn only_the_conflicting_port_is_lost() {
    let other = named("b", ONE, Some(1));
    let mut loser = named("a", ONE, Some(2));
    loser.ports.push(service_port("b", Protocol::Tcp, 81));
    loser.ports.push(service_port("c", Protocol::Udp, 80));
    let brain = brain([loser, other]);
    assert_eq!(lost(&brain, "a"), [vec![ONE.parse::<IpAddr>().unwrap()], vec![], vec![]]);
}

#[test]
fn losing_a_node_port_leaves_the_rest() {
    let with_node_port = |name, address, created| {
        let mut service = named(name, address, created);
        service.ports[0].node_port = Some(number(30080));
        service
    };
    let brain = brain([with_node_port("a", ONE, Some(2)), with_node_port("b", "10.96.0.2", Some(1))]);
    let port = |name| {
        let state = &brain.state("n1").unwrap().services[&ServiceName::new("ns", name)];
        state.service.ports[0].node_port
    };
    assert_eq!((port("a"), port("b")), (None, Some(number(30080))));
    assert_eq!(rejected_items(&brain), ["Service ns/a: node port 30080/TCP"]);
}

#[test]
fn services_that_are_not_served_claim_nothing() {
    let foreign = Service { proxy_name: Some("mesh".into()), ..named("a", ONE, Some(1)) };
    let brain = brain([foreign, named("b", ONE, Some(2))]);
    assert!(lost(&brain, "b").concat().is_empty() && rejected_items(&brain).is_empty());
}

#[test]
fn with_many_claims_every_loser_is_reported_and_the_next_one_follows() {
    const MANY: u32 = 20_000;
    let name = |n| format!("s{n:05}");
    let one = ONE.parse::<IpAddr>().unwrap();
    // Each one is older than those before it and takes over the address.
    let mut brain = brain((1..=MANY).map(|n| {
        let own = IpAddr::from(std::net::Ipv4Addr::from(0x0a40_0000 + n));
        let external_ips = vec![one];
        Service { external_ips, ..named(&name(n), &own.to_string(), Some((MANY - n).into())) }
    }));
    assert!(lost(&brain, &name(MANY)).concat().is_empty());
    assert_eq!(lost(&brain, &name(1)), [[one]]);
    let rejected: Vec<_> = brain.rejected().collect();
    assert_eq!(rejected.len() as u32, MANY - 1);
    assert!(rejected.iter().all(|it| it.reason.starts_with("it belongs to Service ns/s20000 ")));
    // The winners are deleted one by one, and the next one gets the address.
    for n in (2..=MANY).rev() {
        brain.delete_service(&ServiceName::new("ns", name(n)));
        if n % 5_000 == 1 {
            let changed = brain.recompute();
            assert!(changed.iter().map(AsRef::as_ref).eq(["n1"]), "{changed:?}");
            assert!(lost(&brain, &name(n - 1)).concat().is_empty());
        }
    }
    brain.recompute();
    assert!(rejected_items(&brain).is_empty() && lost(&brain, &name(1)).concat().is_empty());
}
