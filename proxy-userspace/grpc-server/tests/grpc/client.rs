//! The client library across restarts of a brain.

use std::{future::pending, mem, sync::Arc, time::Duration};

use proxy_contract::{
    client::Incremental,
    localv1::{Endpoint, Service},
};
use tokio::{sync::oneshot, task::yield_now, time::sleep};

use crate::common::{Brain, in_time, is_pending, service, state, until, while_following};

type Records = Arc<std::sync::Mutex<Vec<String>>>;

#[derive(Debug, Default)]
struct Recorder {
    records: Records,
    /// Dropped within the first change set.
    cancel: Option<oneshot::Sender<()>>,
}

impl Recorder {
    /// Fails at the Service that cannot be made.
    fn record(&self, text: String) -> Result<(), String> {
        self.records.lock().unwrap().push(text.clone());
        if text == "+ ns/impossible" { Err(text) } else { Ok(()) }
    }
}

impl Incremental for Recorder {
    type Error = String;

    async fn set_service(&mut self, service: &Service) -> Result<(), String> {
        drop(self.cancel.take());
        yield_now().await;
        self.record(format!("+ {}/{}", service.namespace, service.name))
    }
    async fn delete_service(&mut self, namespace: &str, name: &str) -> Result<(), String> {
        self.record(format!("- {namespace}/{name}"))
    }
    async fn set_endpoint(
        &mut self,
        namespace: &str,
        service: &str,
        key: &str,
        endpoint: &Endpoint,
    ) -> Result<(), String> {
        let ips = endpoint.ips.as_ref().unwrap().v4.join(" ");
        self.record(format!("+ {namespace}/{service}/{key} {ips}"))
    }
    async fn delete_endpoint(&mut self, namespace: &str, service: &str, key: &str) -> Result<(), String> {
        self.record(format!("- {namespace}/{service}/{key}"))
    }
    async fn sync(&mut self) -> Result<(), String> {
        self.record("sync".into())
    }
}

/// Waits for a sync, and takes all records.
async fn take(records: &Records) -> Vec<String> {
    until(|| records.lock().unwrap().iter().any(|it| it == "sync")).await;
    mem::take(&mut *records.lock().unwrap())
}

#[tokio::test]
async fn callbacks_are_a_minimal_difference_also_after_a_restart() {
    let (folder, brain) =
        Brain::serving(state([service("ns/a", &[("p", 1), ("q", 2)]), service("ns/gone", &[("@p", 1)])]))
            .await;
    let mut recorder = Recorder::default();
    let records = Arc::clone(&recorder.records);
    let client = folder.client();
    let running = tokio::spawn(async move { client.run(&mut recorder).await });
    let first =
        ["+ ns/a", "+ ns/gone", "+ ns/a/p 10.1.0.1", "+ ns/a/q 10.1.0.2", "+ ns/gone/p 10.1.0.1", "sync"];
    assert_eq!(take(&records).await, first);
    let brain = brain.restart(&folder).await;
    // Another state, of a brain without a memory of the previous one.
    brain.publish([service("ns/a", &[("p", 1), ("q", 3), ("r", 4)]), service("ns/b", &[])]);
    let difference = ["+ ns/b", "+ ns/a/r 10.1.0.4", "+ ns/a/q 10.1.0.3", "- ns/gone/p", "- ns/gone", "sync"];
    assert_eq!(take(&records).await, difference);
    // The same state again causes no callback; after that, only what is new does.
    let same = brain.publisher.current().unwrap().state.clone();
    let brain = brain.restart(&folder).await;
    brain.publisher.publish(same.clone());
    sleep(Duration::from_millis(500)).await;
    let mut more = same;
    more.services.insert(service("ns/c", &[]).1);
    brain.publisher.publish(more);
    assert_eq!(take(&records).await, ["+ ns/c", "sync"]);
    brain.publish([]);
    let all = ["- ns/a/r", "- ns/a/q", "- ns/a/p", "- ns/c", "- ns/b", "- ns/a", "sync"];
    assert_eq!(take(&records).await, all);
    running.abort();
}

#[tokio::test]
async fn the_last_state_stays_during_an_outage_and_unchanged_values_are_shared() {
    let (folder, brain) = Brain::new().await;
    let first = state([service("ns/a", &[("p", 1)]), service("ns/b", &[("p", 1)])]);
    brain.publisher.publish(first.clone());
    let mut watch = folder.client().watch();
    let before = in_time(watch.next()).await;
    brain.stop().await;
    assert!(is_pending(300, watch.next()).await);
    // The same state from another process is not returned.
    let brain = Brain::start(&folder).await;
    brain.publisher.publish(first);
    assert!(is_pending(1000, watch.next()).await);
    brain.publish([service("ns/a", &[("p", 2)]), service("ns/b", &[("p", 1)])]);
    let after = in_time(watch.next()).await;
    assert!(Arc::ptr_eq(&before.services["ns/b"], &after.services["ns/b"]), "equal values are shared");
    assert_ne!(before.services["ns/a"], after.services["ns/a"]);
    assert_ne!(before.revision.unwrap().instance_id, after.revision.unwrap().instance_id);
}

#[tokio::test]
async fn an_upstream_publishes_the_same_states_and_revisions() {
    let (folder, brain) = Brain::new().await;
    while_following(folder.upstream(), async |mut states| {
        for round in 1..20 {
            let endpoints = |it| [("p", round), ("@x", 100 + it)];
            brain.publish((0..round).map(|it| service(&format!("ns/s{it}"), &endpoints(it))));
            let published = states.next().await.unwrap();
            assert_eq!(*published, *brain.publisher.current().unwrap(), "with its revision");
        }
    })
    .await;
}

#[tokio::test]
async fn an_error_ends_a_run_and_the_next_one_begins_anew() {
    let (folder, brain) = Brain::serving(state([service("ns/a", &[]), service("ns/impossible", &[])])).await;
    let mut recorder = Recorder::default();
    let failed = in_time(folder.client().run(&mut recorder)).await;
    assert_eq!(failed.unwrap_err(), "+ ns/impossible");
    brain.publish([service("ns/a", &[])]);
    in_time(folder.client().run_once(&mut recorder, pending())).await.unwrap();
    assert_eq!(take(&recorder.records).await, ["+ ns/a", "+ ns/impossible", "+ ns/a", "sync"]);
    brain.stop().await;
}

#[tokio::test]
async fn a_cancelled_run_ends_after_its_change_set() {
    let (folder, brain) = Brain::serving(state([service("ns/a", &[("p", 1)]), service("ns/b", &[])])).await;
    let (cancel, cancelled) = oneshot::channel();
    let mut recorder = Recorder { cancel: Some(cancel), ..Recorder::default() };
    let cancelled = async { drop(cancelled.await) };
    in_time(folder.client().run_until(&mut recorder, cancelled)).await.unwrap();
    assert_eq!(take(&recorder.records).await, ["+ ns/a", "+ ns/b", "+ ns/a/p 10.1.0.1", "sync"]);
    brain.stop().await;
}
