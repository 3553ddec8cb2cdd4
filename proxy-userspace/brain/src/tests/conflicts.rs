//! Several Services that claim the same frontend: which claim nothing, and many claims. The order of precedence is tested with
//! random histories, in `model`; `tests/scenarios/changes.yaml` has the rest.

use std::net::IpAddr;

use model::{Timestamp, cluster::ObjectName};

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
        brain.cluster_mut().services.insert(it);
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
    brain.rejections().iter().map(|it| it.item.clone()).collect()
}

const ONE: &str = "10.96.0.1";

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
    // Each one is older than those before it and takes over the address; the first one is undated.
    let mut brain = brain((1..=MANY).map(|n| {
        let own = IpAddr::from(std::net::Ipv4Addr::from(0x0a40_0000 + n));
        let external_ips = vec![one];
        let created = (n > 1).then(|| (MANY - n).into());
        Service { external_ips, ..named(&name(n), &own.to_string(), created) }
    }));
    assert!(lost(&brain, &name(MANY)).concat().is_empty());
    assert_eq!(lost(&brain, &name(1)), [[one]]);
    let rejections = brain.rejections().clone();
    assert_eq!(rejections.len() as u32, MANY - 1);
    assert!(rejections.iter().all(|it| it.reason.starts_with("it belongs to Service ns/s20000 ")));
    // A change of another Service does not touch them.
    brain.cluster_mut().services.insert(named("other", "10.96.0.2", None));
    brain.recompute();
    assert!(brain.rejections().ptr_eq(&rejections));
    // The winners are deleted one by one, and the next one gets the address.
    for n in (2..=MANY).rev() {
        brain.cluster_mut().delete(&ObjectName::Service(ServiceName::new("ns", name(n))));
        if n % 5_000 == 1 {
            let changed = brain.recompute();
            assert!(changed.iter().map(AsRef::as_ref).eq(["n1"]), "{changed:?}");
            assert!(lost(&brain, &name(n - 1)).concat().is_empty());
        }
    }
    brain.recompute();
    assert!(rejected_items(&brain).is_empty() && lost(&brain, &name(1)).concat().is_empty());
}

#[test]
fn of_a_service_that_loses_very_many_frontends_the_first_are_listed_and_the_others_counted() {
    let ports: Vec<_> = (1..=1_000)
        .map(|it| ServicePort { port: it.try_into().unwrap(), ..service().ports[0].clone() })
        .collect();
    let [a, b] = ["a", "b"].map(|it| Service { ports: ports.clone(), ..named(it, ONE, None) });
    let brain = brain([a, b]);
    let items = rejected_items(&brain);
    assert_eq!((items.len(), brain.rejections().len()), (101, 101));
    assert_eq!(items[0], "Service ns/b: 10.96.0.1:1/TCP");
    assert_eq!(
        brain.rejections().iter().last().unwrap().to_string(),
        "Service ns/b: rejected as well: 900 more parts"
    );
}
