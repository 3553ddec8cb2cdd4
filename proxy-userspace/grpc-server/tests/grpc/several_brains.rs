//! Clients with the addresses of several brains: they spread, leave a brain that is lost, hangs or has no state yet, and
//! receive only what differs.

use std::collections::{BTreeMap, BTreeSet};

use proxy_contract::{
    Targets,
    client::{Client, State},
};
use publish::upstream::Upstream;
use tokio::net::UnixListener;

use crate::{
    common::{Brain, Folder, in_time, is_pending, service, state, while_following},
    resume::{Front, large},
};

fn targets<'a>(folders: impl IntoIterator<Item = &'a Folder>) -> Targets {
    let all: Vec<_> = folders.into_iter().map(|it| format!("unix://{}", it.socket().display())).collect();
    all.join(",").parse().unwrap()
}

fn instance(state: &State) -> u64 {
    state.revision.as_ref().unwrap().instance_id
}

#[tokio::test]
async fn clients_spread_over_the_brains_and_all_are_listed() {
    let (a, b, c) = (Brain::new().await, Brain::new().await, Brain::new().await);
    let client = Client::new(targets([&a.0, &b.0, &c.0]), "n1");
    let mut clients = Vec::new();
    let mut counts = BTreeMap::<_, usize>::new();
    for (_, brain) in [&a, &b, &c] {
        brain.publish([service("ns/a", &[])]);
    }
    for _ in 0..90 {
        let mut watch = client.watch();
        *counts.entry(instance(&*in_time(watch.next()).await)).or_default() += 1;
        clients.push(watch);
    }
    assert!(counts.len() == 3 && counts.values().all(|it| *it > 12), "{counts:?}");
    assert_eq!(client.nodes(None).await.unwrap().len(), 90);
    // Those of a brain that is gone are missing.
    let followed = a.1.publisher.current().unwrap().instance_id;
    a.1.stop().await;
    assert_eq!(client.nodes(None).await.unwrap().len(), 90 - counts[&followed]);
}

#[tokio::test]
async fn a_client_whose_brain_is_lost_receives_almost_nothing_from_another() {
    let brains = [Brain::new().await, Brain::new().await];
    let before = large(2_000);
    let mut instances = Vec::new();
    for (_, brain) in &brains {
        brain.publisher.publish(before.clone());
        instances.push(brain.publisher.current().unwrap().instance_id);
    }
    let fronts = brains.each_ref().map(|(folder, _)| Front::new(folder.socket()));
    let upstream = Upstream::new(Client::new(targets(fronts.each_ref().map(|it| &it.folder)), "n1"), "n1");
    while_following(upstream, async |mut states| {
        let first = states.next().await.unwrap();
        assert_eq!(first.state, before);
        let lost = instances.iter().position(|it| *it == first.instance_id).unwrap();
        let [mut lost_brain, mut other] = brains;
        if lost == 1 {
            std::mem::swap(&mut lost_brain, &mut other);
        }
        let bytes = fronts[1 - lost].bytes();
        lost_brain.1.stop().await;
        let mut after = before.clone();
        after.services.insert(service("zz/last", &[]).1);
        other.1.publisher.publish(after.clone());
        assert_eq!(states.next().await.unwrap().state, after);
        let bytes = fronts[1 - lost].bytes() - bytes;
        assert!((30_000..50_000).contains(&bytes), "{bytes} bytes");
        other.1.stop().await;
    })
    .await;
}

#[tokio::test]
async fn a_brain_without_a_state_gets_no_client_of_several_brains() {
    let ((starting, starting_brain), (ready, ready_brain)) = (Brain::new().await, Brain::new().await);
    ready_brain.publish([service("ns/a", &[])]);
    let client = Client::new(targets([&starting, &ready]), "n1");
    let mut clients: Vec<_> = (0..16).map(|_| client.watch()).collect();
    let mut instances = BTreeSet::new();
    for watch in &mut clients {
        instances.insert(instance(&*in_time(watch.next()).await));
    }
    assert_eq!(instances, BTreeSet::from([ready_brain.publisher.current().unwrap().instance_id]));
    // While none has one, they ask both again and again.
    ready_brain.stop().await;
    let watch = &mut clients[0];
    assert!(is_pending(500, watch.next()).await);
    starting_brain.publish([service("ns/b", &[])]);
    let after = in_time(watch.next()).await;
    assert!(after.services.contains_key("ns/b") && !after.services.contains_key("ns/a"));
    starting_brain.stop().await;
}

#[tokio::test]
async fn a_brain_that_does_not_answer_is_left_for_another() {
    let (folder, brain) = Brain::serving(state([])).await;
    // The kernel accepts connections for it.
    let hanging = Folder::new();
    let _hanging = UnixListener::bind(hanging.socket()).unwrap();
    let client = Client::new(targets([&hanging, &folder]), "n1");
    let mut clients: Vec<_> = (0..16).map(|_| client.watch()).collect();
    // Some of them have asked the hanging one first.
    for watch in &mut clients[..4] {
        in_time(watch.next()).await;
    }
    let nodes = client.nodes(None).await.unwrap();
    assert_eq!(nodes.len(), 4);
    brain.stop().await;
}

/// As an API server's watch after a reconnect to another server: revisions of two brains cannot be compared.
#[tokio::test]
async fn a_brain_that_is_behind_takes_its_clients_back_until_it_has_caught_up() {
    let ((first, brain), (second, behind)) = (Brain::new().await, Brain::new().await);
    let (old, new) = (state([service("ns/a", &[("p", 1)])]), state([service("ns/a", &[("p", 2)])]));
    brain.publisher.publish(new.clone());
    let upstream = Upstream::new(Client::new(targets([&first, &second]), "n1"), "n1");
    while_following(upstream, async |mut states| {
        // The other one has no state yet.
        assert_eq!(states.next().await.unwrap().state, new);
        behind.publisher.publish(old.clone());
        brain.stop().await;
        // A state that was true, as a whole, and then the newest.
        assert_eq!(states.next().await.unwrap().state, old);
        behind.publisher.publish(new.clone());
        assert_eq!(states.next().await.unwrap().state, new);
        behind.stop().await;
    })
    .await;
}
