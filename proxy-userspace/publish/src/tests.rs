//! Revisions and subscriptions.

use std::{sync::Arc, time::Duration};

use model::{
    ServiceName,
    state::{NodeState, Service, ServiceState},
};
use tokio::time::timeout;

use crate::Publisher;

fn state(names: &[&str]) -> NodeState {
    let services = names.iter().map(|name| {
        let name = ServiceName::new("ns", *name);
        let service = Service::new(name.clone());
        (name, Arc::new(ServiceState::new(service, [])))
    });
    NodeState { services: services.collect(), ..NodeState::default() }
}

#[test]
fn an_equal_state_gets_no_revision() {
    let publisher = Publisher::new("n1");
    assert!(publisher.current().is_none());
    assert_eq!(publisher.publish(state(&["a"])), 1);
    assert_eq!(publisher.publish(state(&["a"])), 1);
    assert_eq!(publisher.publish(state(&["b"])), 2);
    assert_eq!(publisher.publish(state(&["a"])), 3);
    // The empty state has a revision, too.
    let publisher = Publisher::new("n1");
    assert_eq!([(); 2].map(|()| publisher.publish(NodeState::default())), [1, 1]);
}

#[test]
fn unchanged_services_are_shared() {
    let publisher = Publisher::new("n1");
    publisher.publish(state(&["a"]));
    let before = publisher.current().unwrap();
    publisher.publish(state(&["a", "b"]));
    let after = publisher.current().unwrap();
    let a = ServiceName::new("ns", "a");
    assert!(Arc::ptr_eq(&before.state.services[&a], &after.state.services[&a]));
}

#[tokio::test(start_paused = true)]
async fn a_slow_subscriber_gets_only_the_newest_and_a_new_one_starts_with_it() {
    let publisher = Publisher::new("n1");
    let mut subscription = publisher.subscribe();
    assert!(timeout(Duration::from_secs(1), subscription.next()).await.is_err());
    publisher.publish(state(&["a"]));
    publisher.publish(state(&["b"]));
    assert_eq!(subscription.next().await.unwrap().rev, 2);
    publisher.publish(state(&["b"]));
    assert!(timeout(Duration::from_secs(1), subscription.next()).await.is_err());
    for mut new in [publisher.subscribe(), subscription.resubscribe()] {
        assert_eq!(new.next().await.unwrap().rev, 2);
        assert!(timeout(Duration::from_secs(1), new.next()).await.is_err());
    }
    drop(publisher);
    assert!(subscription.next().await.is_none());
}
