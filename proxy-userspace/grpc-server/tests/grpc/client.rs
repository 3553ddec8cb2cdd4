//! The client library across restarts of a brain.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use proxy_contract::{
    client::{Incremental, State},
    localv1::{Endpoint, Service},
};
use tokio::time::timeout;

use crate::common::{Brain, LIMIT, service, state, while_following};

/// Records the callbacks.
#[derive(Debug, Default)]
struct Recorder(Arc<std::sync::Mutex<Vec<String>>>);

impl Recorder {
    /// Fails at the Service that cannot be made.
    fn record(&self, text: String) -> Result<(), String> {
        self.0.lock().unwrap().push(text.clone());
        if text == "+ ns/impossible" { Err(text) } else { Ok(()) }
    }
}

impl Incremental for Recorder {
    type Error = String;

    async fn set_service(&mut self, service: &Service) -> Result<(), String> {
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

/// Waits for a number of syncs, and takes all records.
async fn take(records: &Arc<std::sync::Mutex<Vec<String>>>, syncs: usize) -> Vec<String> {
    let enough = async {
        while records.lock().unwrap().iter().filter(|it| *it == "sync").count() < syncs {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(LIMIT, enough).await.unwrap();
    std::mem::take(&mut *records.lock().unwrap())
}

#[tokio::test]
async fn callbacks_are_a_minimal_difference_also_after_a_restart() {
    let (folder, brain) = Brain::new().await;
    brain
        .publisher
        .publish(state([service("ns/a", &[("p", 1), ("q", 2)]), service("ns/gone", &[("@p", 1)])]));
    let mut recorder = Recorder::default();
    let records = Arc::clone(&recorder.0);
    let client = folder.client();
    let running = tokio::spawn(async move { client.run(&mut recorder).await });
    let first =
        ["+ ns/a", "+ ns/gone", "+ ns/a/p 10.1.0.1", "+ ns/a/q 10.1.0.2", "+ ns/gone/p 10.1.0.1", "sync"];
    assert_eq!(take(&records, 1).await, first);
    brain.stop().await;
    let brain = Brain::start(&folder).await;
    // Another state, of a brain without a memory of the previous one.
    brain.publisher.publish(state([service("ns/a", &[("p", 1), ("q", 3), ("r", 4)]), service("ns/b", &[])]));
    let difference = ["+ ns/b", "+ ns/a/r 10.1.0.4", "+ ns/a/q 10.1.0.3", "- ns/gone/p", "- ns/gone", "sync"];
    assert_eq!(take(&records, 1).await, difference);
    // The same state again causes no callback; after that, only what is new does.
    let same = brain.publisher.current().unwrap().state.clone();
    brain.stop().await;
    let brain = Brain::start(&folder).await;
    brain.publisher.publish(same.clone());
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut more = same;
    more.services.insert(service("ns/c", &[]).1);
    brain.publisher.publish(more);
    assert_eq!(take(&records, 1).await, ["+ ns/c", "sync"]);
    brain.publisher.publish(state([]));
    let all = ["- ns/a/r", "- ns/a/q", "- ns/a/p", "- ns/c", "- ns/b", "- ns/a", "sync"];
    assert_eq!(take(&records, 1).await, all);
    running.abort();
}

#[tokio::test]
async fn the_last_state_stays_during_an_outage_and_unchanged_values_are_shared() {
    let (folder, brain) = Brain::new().await;
    let first = state([service("ns/a", &[("p", 1)]), service("ns/b", &[("p", 1)])]);
    brain.publisher.publish(first.clone());
    let mut watch = folder.client().watch();
    let before: Arc<State> = timeout(LIMIT, watch.next()).await.unwrap().unwrap();
    brain.stop().await;
    assert!(timeout(Duration::from_millis(300), watch.next()).await.is_err());
    // The same state from another process is not returned.
    let brain = Brain::start(&folder).await;
    brain.publisher.publish(first);
    assert!(timeout(Duration::from_millis(1000), watch.next()).await.is_err());
    brain.publisher.publish(state([service("ns/a", &[("p", 2)]), service("ns/b", &[("p", 1)])]));
    let after = timeout(LIMIT, watch.next()).await.unwrap().unwrap();
    assert!(Arc::ptr_eq(&before.services["ns/b"], &after.services["ns/b"]), "equal values are shared");
    assert_ne!(before.services["ns/a"], after.services["ns/a"]);
    assert_ne!(before.revision.unwrap().instance_id, after.revision.unwrap().instance_id);
}

#[tokio::test]
async fn an_upstream_publishes_the_same_states_and_revisions() {
    let (folder, brain) = Brain::new().await;
    let upstream = folder.upstream();
    let mut states = upstream.subscribe();
    let check = async {
        for round in 1..20 {
            let all: BTreeMap<_, _> = (0..round)
                .map(|it| service(&format!("ns/s{it}"), &[("p", round), ("@x", 100 + it)]))
                .collect();
            brain.publisher.publish(state(all));
            let published = states.next().await.unwrap();
            assert_eq!(*published, *brain.publisher.current().unwrap(), "with its revision");
        }
    };
    while_following(&upstream, check).await;
}

#[tokio::test]
async fn an_empty_state_after_a_restart_deletes_everything() {
    let (folder, brain) = Brain::new().await;
    brain.publisher.publish(state([service("ns/a", &[("p", 1)])]));
    let mut watch = folder.client().watch();
    assert_eq!(timeout(LIMIT, watch.next()).await.unwrap().unwrap().services.len(), 1);
    brain.stop().await;
    let brain = Brain::start(&folder).await;
    brain.publisher.publish(state([]));
    assert!(timeout(LIMIT, watch.next()).await.unwrap().unwrap().services.is_empty());
}

#[tokio::test]
async fn an_error_ends_a_run_and_the_next_one_begins_anew() {
    let (folder, brain) = Brain::new().await;
    brain.publisher.publish(state([service("ns/a", &[]), service("ns/impossible", &[])]));
    let mut recorder = Recorder::default();
    let failed = timeout(LIMIT, folder.client().run(&mut recorder)).await.unwrap();
    assert_eq!(failed.unwrap_err(), "+ ns/impossible");
    brain.publisher.publish(state([service("ns/a", &[])]));
    let cancelled = std::future::pending();
    timeout(LIMIT, folder.client().run_once(&mut recorder, cancelled)).await.unwrap().unwrap();
    let records = std::mem::take(&mut *recorder.0.lock().unwrap());
    assert_eq!(records, ["+ ns/a", "+ ns/impossible", "+ ns/a", "sync"]);
    brain.stop().await;
}

/// Ends its run while a change set is being applied.
struct Slow {
    recorder: Recorder,
    cancel: Option<tokio::sync::oneshot::Sender<()>>,
}

impl Incremental for Slow {
    type Error = String;

    async fn set_service(&mut self, service: &Service) -> Result<(), String> {
        drop(self.cancel.take());
        tokio::task::yield_now().await;
        self.recorder.set_service(service).await
    }
    async fn delete_service(&mut self, namespace: &str, name: &str) -> Result<(), String> {
        self.recorder.delete_service(namespace, name).await
    }
    async fn set_endpoint(
        &mut self,
        namespace: &str,
        service: &str,
        key: &str,
        it: &Endpoint,
    ) -> Result<(), String> {
        self.recorder.set_endpoint(namespace, service, key, it).await
    }
    async fn delete_endpoint(&mut self, namespace: &str, service: &str, key: &str) -> Result<(), String> {
        self.recorder.delete_endpoint(namespace, service, key).await
    }
    async fn sync(&mut self) -> Result<(), String> {
        self.recorder.sync().await
    }
}

#[tokio::test]
async fn a_cancelled_run_ends_after_its_change_set() {
    let (folder, brain) = Brain::new().await;
    brain.publisher.publish(state([service("ns/a", &[("p", 1)]), service("ns/b", &[])]));
    let (cancel, cancelled) = tokio::sync::oneshot::channel();
    let mut slow = Slow { recorder: Recorder::default(), cancel: Some(cancel) };
    let cancelled = async { drop(cancelled.await) };
    timeout(LIMIT, folder.client().run_until(&mut slow, cancelled)).await.unwrap().unwrap();
    let records = std::mem::take(&mut *slow.recorder.0.lock().unwrap());
    assert_eq!(records, ["+ ns/a", "+ ns/b", "+ ns/a/p 10.1.0.1", "sync"]);
    brain.stop().await;
}
