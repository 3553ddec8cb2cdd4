//! Follows what is published and brings the newest state into force, again and again.
//!
//! The one rule: nothing queues. While one state is being applied, those that come and go are never seen.

use std::{collections::BTreeSet, panic, sync::Arc, time::Duration};

use publish::{Published, Subscription};
use tokio::{
    task::spawn_blocking,
    time::{Instant, timeout},
};

use crate::{
    Rejected,
    ebpf::{Error, Node, Report},
};

/// How long to wait before a failed apply is tried again: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(30));

/// Keeps `node` at the newest state, until the publisher is gone. A failure leaves the last state in force, is reported,
/// and is tried again with a growing pause, or at once with the next state.
pub async fn follow(mut node: Node, mut states: Subscription) {
    let mut rejected = BTreeSet::new();
    let mut pause = BACKOFF.0;
    let Some(mut published) = states.next().await else { return };
    loop {
        let begin = Instant::now();
        let result;
        (node, result) = apply(node, Arc::clone(&published)).await;
        match result {
            Ok(report) => {
                pause = BACKOFF.0;
                tell(&published, &report, begin.elapsed(), &mut rejected);
                let settled;
                (node, settled) = settle(node).await;
                if let Err(error) = settled {
                    tracing::warn!(error = error_chain(&error), "the spare maps will be written anew");
                }
                match states.next().await {
                    Some(next) => published = next,
                    None => return,
                }
            }
            Err(error) => {
                tracing::error!(
                    rev = published.rev,
                    error = error_chain(&error),
                    "this state is not in force, the one before goes on serving; trying again in {pause:?}"
                );
                match timeout(pause, states.next()).await {
                    Ok(Some(next)) => published = next,
                    Ok(None) => return,
                    Err(_) => pause = (pause * 2).min(BACKOFF.1),
                }
            }
        }
    }
}

async fn apply(mut node: Node, published: Arc<Published>) -> (Node, Result<Report, Error>) {
    in_own_thread(move || {
        let result = node.apply(&published.state);
        (node, result)
    })
    .await
}

async fn settle(mut node: Node) -> (Node, Result<(), Error>) {
    in_own_thread(move || {
        let result = node.settle();
        (node, result)
    })
    .await
}

/// Runs what waits inside the kernel.
async fn in_own_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(work).await {
        Ok(done) => done,
        // Blocking work is never cancelled: it has panicked.
        Err(error) => panic::resume_unwind(error.into_panic()),
    }
}

/// Says what is in force now, and what of it is not; each rejection once.
fn tell(published: &Published, report: &Report, took: Duration, rejected: &mut BTreeSet<Rejected>) {
    if report.flipped {
        tracing::info!(
            rev = published.rev,
            services = report.services,
            changed = report.changed_services,
            entries = report.entries,
            ?took,
            "in force"
        );
    }
    let now: BTreeSet<_> = report.rejected.iter().cloned().collect();
    for it in now.difference(rejected) {
        tracing::warn!("not served: {it}");
    }
    *rejected = now;
}

/// An error with its causes, on one line.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line
}
