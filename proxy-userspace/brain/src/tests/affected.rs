//! Which endpoints are derived again after a change of some. That the result is right is tested with random histories, in
//! `tests/properties.rs`.

use super::*;
use crate::{affected::Affected, select::Topology, slice_index::Replaced};

/// Forty endpoints, each with a pod; the first also has an address of IPv6.
fn slices() -> [EndpointSlice; 2] {
    let endpoint = |n: u8| pod(at(&format!("10.1.0.{n}")), &format!("p{n}"));
    [
        slice((1..=40).map(endpoint).collect::<Vec<_>>()),
        slice_named("web-6", Family::V6, vec![pod(at("fd00::1"), "p1"), pod(at("fd00::2"), "p2")]),
    ]
}

/// The addresses that are derived again after a change of the first slice; `None` if all are.
fn affected(change: impl FnOnce(&mut EndpointSlice)) -> Option<Vec<String>> {
    let [before, v6] = slices();
    let mut now = before.clone();
    change(&mut now);
    let replaced = Replaced::from([(before.name.clone(), Arc::new(before))]);
    let slices = [&now, &v6];
    let affected = Affected::find(&slices, &replaced)?;
    Some(affected.addresses.iter().map(ToString::to_string).collect())
}

#[test]
fn of_many_endpoints_those_that_a_change_can_affect_are_derived_again() {
    assert_eq!(affected(|_| ()).unwrap(), [""; 0]);
    // One comes, one goes, one changes.
    let found = affected(|it| it.endpoints.push(pod(at("10.1.0.50"), "p50")));
    assert_eq!(found.unwrap(), ["10.1.0.50"]);
    let found = affected(|it| drop(it.endpoints.remove(8)));
    assert_eq!(found.unwrap(), ["10.1.0.9"]);
    let found = affected(|it| it.endpoints[8] = unready(it.endpoints[8].clone()));
    assert_eq!(found.unwrap(), ["10.1.0.9"]);
    // All addresses of a pod, and all copies of an address.
    let found = affected(|it| drop(it.endpoints.remove(0)));
    assert_eq!(found.unwrap(), ["10.1.0.1", "fd00::1"]);
    let found = affected(|it| it.endpoints[8].address = "10.1.0.10".parse().unwrap());
    assert_eq!(found.unwrap(), ["10.1.0.9", "10.1.0.10"]);
}

#[test]
fn all_endpoints_are_derived_again_where_the_change_may_affect_all() {
    type Change = fn(&mut EndpointSlice);
    let kinds: [(&str, Change); 5] = [
        ("another port", |it| it.ports[0].port = number(9090)),
        ("a hint for a zone", |it| it.endpoints[8] = zones(it.endpoints[8].clone(), &["a"])),
        ("a hint for a node", |it| it.endpoints[8] = nodes(it.endpoints[8].clone(), &["n1"])),
        ("ready and terminating", |it| it.endpoints[8].conditions.terminating = true),
        ("many", |it| drop(it.endpoints.drain(..20))),
    ];
    for (name, change) in kinds {
        assert_eq!(affected(change), None, "{name}");
    }
    // The last ready one goes: others may take its place.
    let endpoint = |n: u8| terminating(pod(at(&format!("10.1.0.{n}")), &format!("p{n}")));
    let now = slice((1..=40).map(endpoint).collect::<Vec<_>>());
    let mut before = now.clone();
    before.endpoints[0] = pod(at("10.1.0.1"), "p1");
    let replaced = Replaced::from([(before.name.clone(), Arc::new(before))]);
    assert!(Affected::find(&[&now], &replaced).is_none());
}

/// Which hints are followed in these zones after a change of endpoints in the zones `a` and `b`, by turns.
fn topologies(change: impl FnOnce(&mut EndpointSlice)) -> Option<[Option<Topology>; 3]> {
    let endpoint =
        |n: u8| zones(pod(at(&format!("10.1.0.{n}")), &format!("p{n}")), &[["a", "b"][usize::from(n % 2)]]);
    let before = slice((1..=40).map(endpoint).collect::<Vec<_>>());
    let mut now = before.clone();
    change(&mut now);
    let replaced = Replaced::from([(before.name.clone(), Arc::new(before))]);
    let slices = [&now];
    let affected = Affected::find(&slices, &replaced)?;
    let zones = [Some("a"), Some("c"), None];
    Some(zones.map(|zone| affected.topology_at(Family::V4, NodeView { name: Some("n1"), zone })))
}

#[test]
fn hints_for_zones_are_followed_as_before_where_the_change_cannot_matter() {
    let [zone, all] = [Topology::Zone, Topology::Unrestricted].map(Some);
    let added = |zones_: &'static [&str]| {
        move |it: &mut EndpointSlice| {
            it.endpoints.push(zones(pod(at("10.1.0.50"), "p50"), zones_));
        }
    };
    assert_eq!(topologies(added(&["a"])), Some([zone, all, all]));
    assert_eq!(topologies(|it| drop(it.endpoints.remove(3))), Some([zone, all, all]));
    // Without a hint of its own it may switch those of all others off, and a zone of its own has states of its own.
    assert_eq!(topologies(added(&[])), Some([None; 3]));
    assert_eq!(topologies(added(&["c"])), None);
    // The only one of its zone: at each of its changes the others are used instead, or no longer.
    let only = |it: &mut EndpointSlice| {
        it.endpoints[8] = unready(zones(it.endpoints[8].clone(), &["c", "a", "b"]));
    };
    assert_eq!(topologies(only), None);
}
