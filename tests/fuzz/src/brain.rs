//! Arbitrary bytes as the history of a cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use arbitrary::{Result, Unstructured};
use brain::{Brain, Options, node_state};
use model::{
    cluster::{ClusterState, Node},
    state::{ExternalForwarding, NodeInfo, NodeState},
};

use crate::{
    invariants,
    random_cluster::{NODES, change, change_of, service_with_slices, with_other_endpoints},
    wire,
};

/// After every step, each node's state equals the result of the pure function, and exactly the changed states are reported.
pub fn target(bytes: &[u8]) {
    // A truncated history has been checked as far as it goes.
    let _ = history(&mut Unstructured::new(bytes));
}

fn history(u: &mut Unstructured<'_>) -> Result<()> {
    let options = Options {
        service_proxy_name: u.ratio(1, 8)?.then(|| "mesh".to_owned()),
        external_ips: !u.ratio(1, 8)?,
        max_namespace_entries: if u.ratio(1, 2)? { u.int_in_range(1..=40)? } else { u64::MAX },
        external_forwarding: *u.choose(&[ExternalForwarding::Nat, ExternalForwarding::Dsr])?,
    };
    let mut brain = Brain::new(options.clone());
    brain.start_serving("n1");
    let mut served = BTreeSet::from(["n1"]);
    while !u.is_empty() {
        match u.int_in_range(0..=18)? {
            kind @ 0..=11 => brain.cluster_mut().apply([change_of(kind, u)?].into()),
            12 => {
                let node = *u.choose(&NODES)?;
                served.insert(node);
                brain.start_serving(node);
            }
            13 => {
                let node = *u.choose(&NODES)?;
                served.remove(node);
                brain.stop_serving(node);
            }
            14 => {
                // Several changes as one snapshot, as sources deliver them.
                let mut cluster = ClusterState::clone(brain.cluster_state());
                for _ in 0..4 {
                    cluster.apply([change(u)?].into());
                }
                brain.replace_cluster(Arc::new(cluster));
            }
            15 => recompute(&mut brain, &served, &options),
            // Endpoints alone, as they change most often, and of a state that is up to date.
            _ => {
                brain.recompute();
                change_endpoints(&mut brain, u)?;
                recompute(&mut brain, &served, &options);
            }
        }
    }
    recompute(&mut brain, &served, &options);
    Ok(())
}

/// Like [`target`], for a Service with slices of equal ports, of which only endpoints change: most often only those that
/// a change can affect are derived again.
pub fn changes_of_endpoints(bytes: &[u8]) {
    let _ = endpoint_history(&mut Unstructured::new(bytes));
}

fn endpoint_history(u: &mut Unstructured<'_>) -> Result<()> {
    let options = Options { external_ips: true, ..Options::default() };
    let mut brain = Brain::new(options.clone());
    NODES.iter().for_each(|it| brain.start_serving(it));
    let served = BTreeSet::from(NODES);
    let (service, slices) = service_with_slices(u)?;
    for (name, zone) in NODES.into_iter().zip([Some("a"), Some("b"), None]) {
        let zone = zone.map(Arc::from);
        brain.cluster_mut().nodes.insert(Node { name: name.into(), zone, info: NodeInfo::default() });
    }
    brain.cluster_mut().services.insert(service);
    slices.into_iter().for_each(|it| brain.cluster_mut().set_slice(it));
    recompute(&mut brain, &served, &options);
    while !u.is_empty() {
        change_endpoints(&mut brain, u)?;
        recompute(&mut brain, &served, &options);
    }
    Ok(())
}

/// Changes the endpoints of one or two slices, if there are any.
fn change_endpoints(brain: &mut Brain, u: &mut Unstructured<'_>) -> Result<()> {
    for _ in 0..u.int_in_range(1..=2)? {
        let slices: Vec<_> = brain.cluster_state().slices().cloned().collect();
        if !slices.is_empty() {
            let slice = with_other_endpoints(u.choose(&slices)?, u)?;
            brain.cluster_mut().set_slice(slice);
        }
    }
    Ok(())
}

fn recompute(brain: &mut Brain, served: &BTreeSet<&str>, options: &Options) {
    let before = states(brain);
    let changed = brain.recompute();
    let after = states(brain);
    assert!(after.keys().map(|it| &**it).eq(served.iter().copied()), "every served node has a state");
    assert!(changed.iter().all(|it| after.contains_key(it)), "every changed node is served");
    for (name, now) in &after {
        assert_eq!(
            *now,
            node_state(brain.cluster_state(), name, options),
            "{name}: incremental and pure results are equal"
        );
        let old = before.get(name);
        assert_eq!(changed.contains(name), old != Some(now), "{name} is reported if and only if it changed");
        let is_shared = old.is_none_or(|old| old != now || old.services.ptr_eq(&now.services));
        assert!(is_shared, "{name}: an unchanged state stays the same object");
        invariants::state(now);
        now.services.values().for_each(|it| wire::round_trip(it));
        let old = old.cloned().unwrap_or_default();
        let mut patched = old.services.clone();
        for (service, was, is) in now.diff(&old) {
            assert_ne!(was, is, "{service} differs");
            match is {
                Some(is) => drop(patched.insert(Arc::clone(is))),
                None => drop(patched.remove(service)),
            }
        }
        assert_eq!(patched, now.services, "{name}: the difference leads from one to the other");
    }
    let rejected = brain.rejections().clone();
    invariants::rejected(&rejected.iter().cloned().collect::<Vec<_>>());
    let mut fresh = Brain::new(options.clone());
    fresh.replace_cluster(Arc::clone(brain.cluster_state()));
    fresh.recompute();
    assert_eq!(&rejected, fresh.rejections(), "conflicts do not depend on the history");
}

fn states(brain: &Brain) -> BTreeMap<Arc<str>, NodeState> {
    brain.served_nodes().filter_map(|it| Some((Arc::clone(it), brain.state(it)?.clone()))).collect()
}
