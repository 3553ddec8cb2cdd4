//! The map against the standard library's.

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::state::{Service, ServiceKind, TrafficPolicy};

fn name(number: usize) -> ServiceName {
    ServiceName::new("ns", format!("s{number:05}"))
}

/// A Service; those of different versions are different.
fn state(number: usize, version: u16) -> Arc<ServiceState> {
    let service = Service {
        name: name(number),
        kind: ServiceKind::ClusterIp,
        cluster_ips: vec![std::net::Ipv4Addr::from(0x0a00_0000 + u32::from(version)).into()],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        ports: Vec::new(),
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        affinity: None,
        source_ranges: Vec::new(),
        health_check_node_port: None,
    };
    Arc::new(ServiceState::new(service, []))
}

fn many(count: usize) -> Services {
    (0..count).map(|it| state(it, 0)).collect()
}

type Model = BTreeMap<ServiceName, Arc<ServiceState>>;
type Difference = (ServiceName, Option<Arc<ServiceState>>, Option<Arc<ServiceState>>);

fn differences(after: &Services, before: &Services) -> Vec<Difference> {
    after.diff(before).map(|(name, old, new)| (name.clone(), old.cloned(), new.cloned())).collect()
}

fn model_differences(after: &Model, before: &Model) -> Vec<Difference> {
    let names: std::collections::BTreeSet<_> = after.keys().chain(before.keys()).collect();
    let both = names.into_iter().map(|it| (it.clone(), before.get(it).cloned(), after.get(it).cloned()));
    both.filter(|(_, old, new)| old != new).collect()
}

/// How many nodes are in one tree only.
fn nodes_of_its_own(services: &Services, other: &Services) -> usize {
    fn all(node: &Arc<Node>, found: &mut Vec<usize>) {
        found.push(Arc::as_ptr(node).addr());
        if let tree::Kids::Nodes(nodes) = &node.kids {
            nodes.iter().for_each(|it| all(it, found));
        }
    }
    let nodes = |it: &Services| {
        let mut found = Vec::new();
        it.root.iter().for_each(|root| all(root, &mut found));
        found
    };
    let others: std::collections::HashSet<_> = nodes(other).into_iter().collect();
    nodes(services).into_iter().filter(|it| !others.contains(it)).count()
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Set(usize, u16),
    Delete(usize),
    DeleteRange(usize),
}

fn some_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..400_usize, 0..3_u16).prop_map(|(at, version)| Step::Set(at, version)),
        3 => (0..400_usize).prop_map(Step::Delete),
        1 => (0..400_usize).prop_map(Step::DeleteRange),
    ]
}

proptest! {
    #[test]
    fn it_is_an_ordered_map(start in 0..400_usize, steps in vec(some_step(), 0..200)) {
        let mut services = many(start);
        let mut model: Model = (0..start).map(|it| (name(it), state(it, 0))).collect();
        let (first, first_model) = (services.clone(), model.clone());
        for step in steps {
            match step {
                Step::Set(at, version) => {
                    prop_assert_eq!(services.insert(state(at, version)), model.insert(name(at), state(at, version)));
                }
                Step::Delete(at) => prop_assert_eq!(services.remove(&name(at)), model.remove(&name(at))),
                Step::DeleteRange(at) => for at in at..at + 50 {
                    prop_assert_eq!(services.remove(&name(at)), model.remove(&name(at)));
                },
            }
            prop_assert_eq!(services.len(), model.len());
        }
        prop_assert!(services.iter().eq(&model));
        prop_assert_eq!(services.iter().len(), services.iter().count());
        prop_assert!(model.iter().all(|(name, state)| services.get(name) == Some(state)));
        prop_assert_eq!(differences(&services, &first), model_differences(&model, &first_model));
        prop_assert_eq!(differences(&first, &services), model_differences(&first_model, &model));
        prop_assert_eq!(&services, &Services::from(model));
        prop_assert_eq!(differences(&first, &many(start)), vec![]);
    }

    #[test]
    fn sharing_changes_no_value(a in vec((0..60_usize, 0..2_u16), 0..80), b in vec((0..60_usize, 0..2_u16), 0..80)) {
        let of = |list: &[(usize, u16)]| list.iter().map(|(at, version)| state(*at, *version)).collect::<Services>();
        let (before, mut after) = (of(&a), of(&b));
        after.reuse_equal(&before);
        prop_assert_eq!(&after, &of(&b));
        for (name, state) in &after {
            let same = before.get(name).filter(|it| *it == state);
            prop_assert!(same.is_none_or(|it| Arc::ptr_eq(it, state)));
        }
    }
}

#[test]
fn a_change_copies_only_the_way_to_it() {
    let before = many(10_000);
    let mut after = before.clone();
    assert!(after.ptr_eq(&before));
    after.insert(state(5_000, 1));
    assert_eq!(nodes_of_its_own(&after, &before), 3);
    let found: Vec<_> = after.diff(&before).map(|(name, ..)| name.clone()).collect();
    assert_eq!(found, [name(5_000)]);
}

#[test]
fn an_equal_service_changes_nothing() {
    let before = many(100);
    let mut after = before.clone();
    after.insert(state(7, 0));
    assert!(after.ptr_eq(&before));
    assert!(!Edit::delete(name(200)).apply(&mut after));
    assert!(after.ptr_eq(&before));
}

#[test]
fn maps_that_share_share_after_the_same_change() {
    let base = many(1_000);
    let mut own = base.clone();
    own.insert(state(10, 1));
    assert_eq!(nodes_of_its_own(&own, &base), 3);
    let mut maps = [base.clone(), own, base];
    let mut edit = Edit::set(state(900, 1));
    assert!(maps.iter_mut().all(|it| edit.apply(it)));
    assert!(maps[0].ptr_eq(&maps[2]));
    assert_eq!(nodes_of_its_own(&maps[1], &maps[0]), 3);
}

#[test]
fn an_equal_map_becomes_the_same_map() {
    let (before, mut after) = (many(100), many(100));
    after.reuse_equal(&before);
    assert!(after.ptr_eq(&before));
}
