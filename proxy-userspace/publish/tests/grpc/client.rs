//! The client library over a brain that dies and comes back.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use proxy_contract::{
    Target,
    client::{Client, Incremental, ResetFilter, State},
    localv1::{Endpoint, Service},
};
use publish::upstream::Upstream;
use tokio::time::timeout;

use crate::common::{Brain, Folder, LIMIT, service, state};

/// Writes down what it is told.
#[derive(Debug, Default)]
struct Notes(Arc<std::sync::Mutex<Vec<String>>>);

impl Notes {
    fn note(&self, text: String) {
        self.0.lock().unwrap().push(text);
    }
}

impl Incremental for Notes {
    fn set_service(&mut self, service: &Service) {
        self.note(format!("+ {}/{}", service.namespace, service.name));
    }
    fn delete_service(&mut self, namespace: &str, name: &str) {
        self.note(format!("- {namespace}/{name}"));
    }
    fn set_endpoint(&mut self, namespace: &str, service: &str, key: &str, endpoint: &Endpoint) {
        let ips = endpoint.ips.as_ref().unwrap().v4.join(" ");
        self.note(format!("+ {namespace}/{service}/{key} {ips}"));
    }
    fn delete_endpoint(&mut self, namespace: &str, service: &str, key: &str) {
        self.note(format!("- {namespace}/{service}/{key}"));
    }
    fn sync(&mut self) {
        self.note("sync".into());
    }
    fn reset(&mut self) {
        self.note("reset".into());
    }
}

/// Waits until so many syncs have been noted, and takes all notes.
async fn notes_of(notes: &Arc<std::sync::Mutex<Vec<String>>>, syncs: usize) -> Vec<String> {
    let enough = async {
        while notes.lock().unwrap().iter().filter(|it| *it == "sync").count() < syncs {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(LIMIT, enough).await.unwrap();
    std::mem::take(&mut *notes.lock().unwrap())
}

#[tokio::test]
async fn incremental_calls_say_what_the_stream_says() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(state([service("ns/a", &[("p", 1), ("@x", 2)])]));
    let notes = Notes::default();
    let written = Arc::clone(&notes.0);
    let client = Client::new(Target::Unix(folder.socket()), "n1");
    let running = tokio::spawn(async move {
        let mut notes = notes;
        client.run(&mut notes).await
    });
    let first = ["reset", "+ ns/a", "+ ns/a/p 10.1.0.1", "+ ns/a/x 10.1.0.2", "sync"];
    assert_eq!(notes_of(&written, 1).await, first);
    brain.publisher.publish(state([service("ns/b", &[("p", 3)])]));
    let second = ["+ ns/b", "- ns/a/x", "+ ns/b/p 10.1.0.3", "- ns/a/p", "- ns/a", "sync"];
    assert_eq!(notes_of(&written, 1).await, second);
    // A new connection says everything again.
    brain.stop().await;
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(state([service("ns/b", &[("p", 3)])]));
    assert_eq!(notes_of(&written, 1).await, ["reset", "+ ns/b", "+ ns/b/p 10.1.0.3", "sync"]);
    running.abort();
    brain.stop().await;
}

#[tokio::test]
async fn a_reset_that_remembers_is_a_minimal_difference() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(state([service("ns/a", &[("p", 1), ("q", 2)]), service("ns/gone", &[("p", 1)])]));
    let notes = Notes::default();
    let written = Arc::clone(&notes.0);
    let client = Client::new(Target::Unix(folder.socket()), "n1");
    let running = tokio::spawn(async move {
        let mut remembering = ResetFilter::new(notes);
        client.run(&mut remembering).await
    });
    assert_eq!(notes_of(&written, 1).await.len(), 6);
    brain.stop().await;
    let brain = Brain::start(&folder.socket()).await;
    // Another state, by a brain that knows nothing of what was before.
    brain.publisher.publish(state([service("ns/a", &[("p", 1), ("q", 3), ("r", 4)]), service("ns/b", &[])]));
    let difference = ["+ ns/b", "+ ns/a/r 10.1.0.4", "+ ns/a/q 10.1.0.3", "- ns/gone/p", "- ns/gone", "sync"];
    assert_eq!(notes_of(&written, 1).await, difference);
    // The same state again: no call at all, and then only what is new.
    let same = brain.publisher.current().unwrap().state.clone();
    brain.stop().await;
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(same.clone());
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut more = same;
    more.services.insert(service("ns/c", &[]).1);
    brain.publisher.publish(more);
    assert_eq!(notes_of(&written, 1).await, ["+ ns/c", "sync"]);
    running.abort();
    brain.stop().await;
}

#[tokio::test]
async fn the_last_state_stays_while_the_brain_is_away_and_only_what_differs_is_new() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    let first = state([service("ns/a", &[("p", 1)]), service("ns/b", &[("p", 1)])]);
    brain.publisher.publish(first.clone());
    let mut watch = Client::new(Target::Unix(folder.socket()), "n1").watch();
    let before: Arc<State> = timeout(LIMIT, watch.next()).await.unwrap().unwrap();
    brain.stop().await;
    assert!(timeout(Duration::from_millis(300), watch.next()).await.is_err());
    // The same content from another process is nothing new.
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(first);
    assert!(timeout(Duration::from_millis(1000), watch.next()).await.is_err());
    brain.publisher.publish(state([service("ns/a", &[("p", 2)]), service("ns/b", &[("p", 1)])]));
    let after = timeout(LIMIT, watch.next()).await.unwrap().unwrap();
    assert!(Arc::ptr_eq(&before.services["ns/b"], &after.services["ns/b"]), "what is equal is shared");
    assert_ne!(before.services["ns/a"], after.services["ns/a"]);
    assert_ne!(before.revision.unwrap().instance_id, after.revision.unwrap().instance_id);
    brain.stop().await;
}

#[tokio::test]
async fn what_comes_out_of_a_chain_is_what_went_in() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    let upstream = Upstream::new(Client::new(Target::Unix(folder.socket()), "n1"), "n1");
    let mut states = upstream.subscribe();
    let check = async {
        for round in 1..20 {
            let all: BTreeMap<_, _> = (0..round)
                .map(|it| service(&format!("ns/s{it}"), &[("p", round), ("@x", 100 + it)]))
                .collect();
            brain.publisher.publish(state(all));
            let published = timeout(LIMIT, states.next()).await.unwrap().unwrap();
            assert_eq!(*published, *brain.publisher.current().unwrap(), "with its revision");
        }
    };
    tokio::select! {
        () = check => {}
        () = upstream.run() => panic!("it never ends"),
    }
    brain.stop().await;
}

#[tokio::test]
async fn a_brain_that_comes_back_with_nothing_takes_everything_away() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(state([service("ns/a", &[("p", 1)])]));
    let mut watch = Client::new(Target::Unix(folder.socket()), "n1").watch();
    assert_eq!(timeout(LIMIT, watch.next()).await.unwrap().unwrap().services.len(), 1);
    brain.stop().await;
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(state([]));
    assert!(timeout(LIMIT, watch.next()).await.unwrap().unwrap().services.is_empty());
    brain.stop().await;
}
