//! The client library across restarts of a brain.

use std::sync::Arc;

use proxy_contract::{client::ChangeWatch, localv1::Endpoint};

use crate::common::{Brain, in_time, is_pending, service, state};

/// The next difference: Services with their endpoints, and deleted ones.
async fn difference(changes: &mut ChangeWatch) -> Vec<String> {
    let change = in_time(changes.next()).await;
    let lines = change.services.iter().map(|(name, it)| match it {
        None => format!("- {name}"),
        Some(it) => {
            let ips = |(key, it): (&Arc<str>, &Arc<Endpoint>)| {
                format!(" {key}={}", it.ips.as_ref().unwrap().v4.join(","))
            };
            format!("+ {name}{}", it.endpoints.iter().map(ips).collect::<String>())
        }
    });
    lines.collect()
}

#[tokio::test]
async fn differences_are_minimal_also_after_a_restart() {
    let same = || service("ns/same", &[("p", 1)]);
    let (folder, brain) = Brain::serving(state([
        service("ns/a", &[("p", 1), ("q", 2)]),
        service("ns/gone", &[("@p", 1)]),
        same(),
    ]))
    .await;
    let mut changes = folder.client().changes();
    let first = ["+ ns/a p=10.1.0.1 q=10.1.0.2", "+ ns/gone p=10.1.0.1", "+ ns/same p=10.1.0.1"];
    assert_eq!(difference(&mut changes).await, first);
    let brain = brain.restart(&folder).await;
    // Another state, of a brain without a memory of the previous one.
    brain.publish([service("ns/a", &[("q", 3), ("r", 4)]), service("ns/b", &[]), same()]);
    let second = ["+ ns/a q=10.1.0.3 r=10.1.0.4", "+ ns/b", "- ns/gone"];
    assert_eq!(difference(&mut changes).await, second);
    // The same state again is no difference; after that, only what is new is.
    let unchanged = brain.publisher.current().unwrap().state.clone();
    let brain = brain.restart(&folder).await;
    brain.publisher.publish(unchanged.clone());
    assert!(is_pending(500, changes.next()).await);
    let mut more = unchanged;
    more.services.insert(service("ns/c", &[]).1);
    brain.publisher.publish(more);
    assert_eq!(difference(&mut changes).await, ["+ ns/c"]);
    brain.publish([]);
    assert_eq!(difference(&mut changes).await, ["- ns/a", "- ns/b", "- ns/c", "- ns/same"]);
    brain.stop().await;
}
