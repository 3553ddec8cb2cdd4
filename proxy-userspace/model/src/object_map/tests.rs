//! The map compared with `BTreeMap`.

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*};

use super::{tree::TreeNode, *};
use crate::{
    ServiceName,
    state::{Service, ServiceState, Services},
};

fn name(number: usize) -> ServiceName {
    ServiceName::new("ns", format!("s{number:05}"))
}

/// A Service; two versions of it are not equal.
fn state(number: usize, version: u16) -> Arc<ServiceState> {
    let service = Service {
        cluster_ips: vec![std::net::Ipv4Addr::from(0x0a00_0000 + u32::from(version)).into()],
        ..Service::new(name(number))
    };
    Arc::new(ServiceState::new(service, []))
}

fn many(count: usize) -> Services {
    (0..count).map(|it| state(it, 0)).collect()
}

type Reference = BTreeMap<ServiceName, Arc<ServiceState>>;
type Difference = (ServiceName, Option<Arc<ServiceState>>, Option<Arc<ServiceState>>);

fn differences(after: &Services, before: &Services) -> Vec<Difference> {
    after.diff(before).map(|(name, old, new)| (name.clone(), old.cloned(), new.cloned())).collect()
}

fn reference_differences(after: &Reference, before: &Reference) -> Vec<Difference> {
    let names: std::collections::BTreeSet<_> = after.keys().chain(before.keys()).collect();
    let both = names.into_iter().map(|it| (it.clone(), before.get(it).cloned(), after.get(it).cloned()));
    both.filter(|(_, old, new)| old != new).collect()
}

/// The number of tree nodes that `other` does not share.
fn unshared_nodes(services: &Services, other: &Services) -> usize {
    fn all(node: &Arc<TreeNode<ServiceState>>, found: &mut Vec<usize>) {
        found.push(Arc::as_ptr(node).addr());
        if let tree::Children::Nodes(nodes) = &node.children {
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
enum Operation {
    Set(usize, u16),
    Delete(usize),
    DeleteRange(usize),
}

fn arbitrary_operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => (0..400_usize, 0..3_u16).prop_map(|(at, version)| Operation::Set(at, version)),
        3 => (0..400_usize).prop_map(Operation::Delete),
        1 => (0..400_usize).prop_map(Operation::DeleteRange),
    ]
}

proptest! {
    #[test]
    fn it_behaves_as_a_btree_map(start in 0..400_usize, steps in vec(arbitrary_operation(), 0..200)) {
        let mut services = many(start);
        let mut reference: Reference = (0..start).map(|it| (name(it), state(it, 0))).collect();
        let (first, first_reference) = (services.clone(), reference.clone());
        for step in steps {
            match step {
                Operation::Set(at, version) => {
                    prop_assert_eq!(services.insert(state(at, version)), reference.insert(name(at), state(at, version)));
                }
                Operation::Delete(at) => prop_assert_eq!(services.remove(&name(at)), reference.remove(&name(at))),
                Operation::DeleteRange(at) => for at in at..at + 50 {
                    prop_assert_eq!(services.remove(&name(at)), reference.remove(&name(at)));
                },
            }
            prop_assert_eq!(services.len(), reference.len());
        }
        prop_assert!(services.iter().eq(&reference));
        prop_assert_eq!(services.len(), services.iter().count());
        prop_assert!(reference.iter().all(|(name, state)| services.get(name) == Some(state)));
        prop_assert_eq!(services.is_empty(), reference.is_empty());
        prop_assert!(services.keys().eq(reference.keys()) && services.values().eq(reference.values()));
        prop_assert!(services.clone().into_values().eq(reference.values().cloned()));
        prop_assert!((0..450).all(|it| services.contains_key(&name(it)) == reference.contains_key(&name(it))));
        prop_assert_eq!(differences(&services, &first), reference_differences(&reference, &first_reference));
        prop_assert_eq!(differences(&first, &services), reference_differences(&first_reference, &reference));
        prop_assert_eq!(&services, &reference.into_values().collect::<Services>());
        prop_assert_eq!(differences(&first, &many(start)), vec![]);
    }

    #[test]
    fn reusing_equal_services_changes_no_value(a in vec((0..60_usize, 0..2_u16), 0..80), b in vec((0..60_usize, 0..2_u16), 0..80)) {
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
fn a_change_copies_only_the_path_to_it_and_maps_still_share_after_the_same_edit() {
    let base = many(10_000);
    let mut own = base.clone();
    assert!(own.ptr_eq(&base));
    own.insert(state(5_000, 1));
    assert_eq!(unshared_nodes(&own, &base), 3);
    let found: Vec<_> = own.diff(&base).map(|(name, ..)| name.clone()).collect();
    assert_eq!(found, [name(5_000)]);
    let mut maps = [base.clone(), own, base];
    let mut edit = Edit::set(state(9_000, 1));
    assert!(maps.iter_mut().all(|it| it.apply(&mut edit)));
    assert!(maps[0].ptr_eq(&maps[2]));
    assert_eq!(unshared_nodes(&maps[1], &maps[0]), 3);
}

#[test]
fn values_of_a_deep_tree_are_taken_in_order() {
    let services = many(10_000);
    assert!(services.clone().into_values().eq(services.values().cloned()));
}

#[test]
fn maps_of_other_services_are_not_equal_and_equal_ones_become_the_same_object() {
    let services = many(3);
    for other in
        [many(2), many(4), Services::default(), [state(0, 0), state(1, 0), state(2, 1)].into_iter().collect()]
    {
        assert!(services != other && !services.ptr_eq(&other));
    }
    let mut same = many(3);
    assert!(services == same && !services.ptr_eq(&same), "equal, and not the same");
    same.reuse_equal(&services);
    assert!(same.ptr_eq(&services));
    assert!(Services::default().ptr_eq(&Services::default()));
}

#[test]
fn a_map_is_made_of_services_in_any_order() {
    let collect = |states: &[Arc<ServiceState>]| states.iter().cloned().collect::<Services>();
    let [a, b, newer_b, c] = [state(1, 0), state(2, 0), state(2, 1), state(3, 0)];
    assert!(collect(&[b.clone(), newer_b.clone()]).values().eq([&newer_b]));
    for states in [
        [a.clone(), b.clone(), newer_b.clone(), c.clone()],
        [c.clone(), b.clone(), newer_b.clone(), a.clone()],
        [b, c.clone(), a.clone(), newer_b.clone()],
    ] {
        let services = collect(&states);
        assert!(services.values().eq([&a, &newer_b, &c]), "{services:?}");
        assert!([1, 2, 3].iter().all(|it| services.contains_key(&name(*it))));
        let named = states.map(|it| (it.service.name.clone(), it));
        assert_eq!(named.into_iter().collect::<Services>(), services);
    }
}

#[test]
fn an_edit_says_whether_it_changes_something_and_otherwise_the_map_stays_the_same_object() {
    let before = many(100);
    let mut after = before.clone();
    after.insert(state(7, 0));
    assert!(after.ptr_eq(&before));
    assert!(!after.apply(&mut Edit::delete(name(200))));
    assert!(after.ptr_eq(&before));
    let mut services = Services::default();
    assert!(!services.apply(&mut Edit::delete(name(1))));
    let mut edit = Edit::set(state(1, 0));
    assert_eq!((edit.object(), Edit::<ServiceState>::delete(name(1)).object()), (Some(&state(1, 0)), None));
    assert!(services.apply(&mut edit) && services.len() == 1);
    assert!(services.apply(&mut Edit::delete(name(1))) && services.is_empty());
}
