//! Follows what is published and brings the newest state into force, again and again.
//!
//! The one rule: nothing queues. While one state is being applied, those that come and go are never seen.

use std::{collections::BTreeSet, io, panic, sync::Arc, time::Duration};

use model::Rejected;
use publish::{Published, Subscription};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    addresses::Addresses,
    canary::{Heard, Trial},
    ebpf::{Ended, Hooks, Report, give_back_memory},
    ending::Ending,
    node::{Error, Node},
    observe::{Doing, Observer},
    said::Said,
};

/// How long to wait before what failed is tried again: at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(30));
/// How often to see whether the programs are still where they should be.
const LOOK: Duration = Duration::from_secs(5);

/// From how many entries on a change leaves memory behind that is worth giving back.
const MANY: usize = 10_000;

/// Keeps `node` at the newest state, until the publisher is gone. A failure leaves the last state in force, is reported,
/// and is tried again with a growing pause, or at once with the next state. What is done is told to `observer`.
pub async fn follow(mut node: Node, mut states: Subscription, observer: &dyn Observer) {
    let mut rejected = BTreeSet::new();
    observer.lacking(node.lacking());
    // The newest state, until it is in the maps; and what is in the maps, until it is in force.
    let mut newest = states.next().await;
    let mut written: Option<Written> = None;
    let mut pause = PAUSE.0;
    // When what has failed is tried again.
    let mut retry: Option<Instant> = None;
    let mut next_look = Instant::now();
    // Whether something is left to be done for what is in force.
    let mut unsettled = false;
    // What was published last, for when the host's addresses change under it.
    let mut latest = newest.clone();
    let mut addresses = Addresses::new();
    if let Some(now) = addresses.news() {
        node.set_interfaces(now);
    }
    let mut ending = node
        .ender()
        .inspect_err(|error| tracing::error!("no flow is ended with its endpoint: {}", chain(error)))
        .unwrap_or_default()
        .map(Ending::start);
    let mut said = Said::default();
    let mut canary = None;
    loop {
        // What has failed waits for its time, or for something new.
        if retry.is_none_or(|it| it <= Instant::now()) {
            let mut failed = false;
            let begin = Instant::now();
            if let Some(published) = &newest {
                observer.taken(published);
                if let Some(ending) = &ending {
                    ending.begin(&published.state);
                }
            }
            let turn;
            (node, turn) = take_turn(node, newest.clone(), written.is_some()).await;
            let Turn { applied, attached, mut left } = turn;
            if let (Some(published), Some(result)) = (&newest, applied) {
                match result {
                    Ok(report) => {
                        written = Some(Written { published: Arc::clone(published), report, begin });
                        newest = None;
                    }
                    Err(error) => {
                        failed = true;
                        let (rev, error) = (published.rev, chain(&error));
                        observer.failed(Doing::Apply, &error);
                        tracing::error!(
                            rev,
                            error,
                            "not in force, the state before goes on serving; next try in {pause:?}"
                        );
                    }
                }
            }
            // Packets that are not where sockets are follow with the next turn.
            let behind = node.behind().map(ToString::to_string);
            if behind.is_some() {
                newest = latest.clone();
            }
            observer.lacking(node.lacking());
            match attached {
                Ok(()) => {
                    let mut was_large = false;
                    let published = written.take().map(|mut written| {
                        was_large = written.report.whole || written.report.entries > MANY;
                        written.report.rejected.append(&mut left);
                        let published = Arc::clone(&written.published);
                        written.tell(&mut rejected, observer);
                        unsettled = true;
                        published
                    });
                    // An apply that failed has tried that, too.
                    if unsettled && !failed {
                        let settled;
                        (node, settled) = in_own_thread(node, Node::settle).await;
                        unsettled = settled.is_err();
                        if let Err(error) = settled {
                            failed = true;
                            let error = chain(&error);
                            observer.failed(Doing::Settle, &error);
                            tracing::warn!(error, "not settled; next try in {pause:?}");
                        }
                    }
                    if was_large {
                        // It took far more than keeping it does.
                        spawn_blocking(give_back_memory);
                    }
                    if let (Some(ending), Some(published)) = (&mut ending, &published) {
                        ending.in_force(published);
                    }
                }
                Err(error) => {
                    failed = true;
                    let error = chain(&error);
                    observer.failed(Doing::Attach, &error);
                    tracing::error!(error, "what should be in effect is not; next try in {pause:?}");
                }
            }
            // What is in force is told first: this is what is left of it.
            if let Some(error) = behind {
                failed = true;
                observer.failed(Doing::Apply, &error);
                tracing::error!(error, "in force for sockets alone; next try in {pause:?}");
            }
            retry = failed.then(|| Instant::now() + pause);
            pause = if failed { (pause * 2).min(PAUSE.1) } else { PAUSE.0 };
        }
        // States may come without a pause; it is looked all the same.
        if next_look <= Instant::now() {
            next_look = Instant::now() + LOOK;
            let looked;
            (node, looked) = look(node, latest.as_ref(), &mut said, &mut canary, observer).await;
            if looked.recovered {
                // What is said of it, and what follows from it, is as with any other state.
                newest = latest.clone();
                retry = None;
            }
            // What is missing is put back at once.
            if retry.is_none() && (looked.recovered || !looked.is_whole) {
                continue;
            }
        }
        let wake = retry.map_or(next_look, |it| it.min(next_look));
        tokio::select! {
            next = states.next() => match next {
                Some(next) => {
                    latest = Some(Arc::clone(&next));
                    newest = Some(next);
                    retry = None;
                }
                None => return,
            },
            now = addresses.changed() => {
                node.set_interfaces(now);
                newest = latest.clone();
                retry = None;
            }
            heard = heard(&mut canary) => {
                said.tell_of_canary(&heard);
                observer.tried(&heard);
            }
            ended = ended(&mut ending) => {
                observer.ended(&ended);
                said.tell_of(&ended);
            }
            () = node.disturbed() => {
                // Whoever changes something is given time to end; and two who undo each other's work do not keep a CPU
                // busy.
                sleep(PAUSE.0).await;
                retry = None;
            }
            () = sleep_until(wake) => {}
        }
    }
}

/// What was seen when the node was looked at.
struct Looked {
    /// Whether every program is in effect, as far as is known.
    is_whole: bool,
    /// Whether packets can be translated which could not be before.
    recovered: bool,
}

/// Asks the kernel what is in effect, tries again what could not be done at all, and tells of it.
async fn look(
    node: Node,
    latest: Option<&Arc<Published>>,
    said: &mut Said,
    canary: &mut Option<Trial>,
    observer: &dyn Observer,
) -> (Node, Looked) {
    let (mut node, looked) = in_own_thread(node, Node::look).await;
    if let (Ok(Some(hooks)), Some(cgroup)) = (&looked, node.cgroup())
        && hooks.are_in_effect()
    {
        canary.get_or_insert_with(|| Trial::start(cgroup.to_owned()));
    }
    let is_whole = tell_of(looked, said, observer);
    let mut recovered = false;
    if let Some(published) = latest.cloned() {
        (node, recovered) = in_own_thread(node, move |node| node.recover(&published.state)).await;
    }
    if recovered {
        tracing::info!("traffic that has no socket here is served at last");
    }
    let excluded;
    (node, excluded) = in_own_thread(node, Node::exclude).await;
    if let Err(error) = excluded {
        tracing::warn!("cgroups that are to be left alone cannot be looked for: {}", chain(&error));
    }
    let memory;
    (node, memory) = in_own_thread(node, Node::memory).await;
    said.tell_of_memory(memory, observer);
    (node, Looked { is_whole, recovered })
}

/// Says what the kernel has said, and whether every program is in effect, as far as is known.
fn tell_of(looked: Result<Option<Hooks>, Error>, said: &mut Said, observer: &dyn Observer) -> bool {
    match looked {
        Ok(None) => true,
        Ok(Some(hooks)) => {
            observer.looked(Ok(&hooks));
            said.tell_of_cgroup(&hooks);
            let missing: Vec<_> = hooks.missing().map(|it| it.name).collect();
            if !missing.is_empty() {
                let cgroup = hooks.cgroup.display();
                tracing::error!(
                    "somebody has taken {} of our programs off {cgroup}, which are put back: {}",
                    missing.len(),
                    missing.join(", ")
                );
            }
            missing.is_empty()
        }
        Err(error) => {
            let error = chain(&error);
            observer.looked(Err(&error));
            tracing::warn!(error, "the kernel does not tell which programs are in effect");
            true
        }
    }
}

/// Waits until flows were looked at.
async fn ended(ending: &mut Option<Ending>) -> io::Result<Ended> {
    match ending {
        Some(ending) => ending.done().await,
        None => std::future::pending().await,
    }
}

/// Waits until the hooks were tried.
async fn heard(canary: &mut Option<Trial>) -> Vec<Heard> {
    match canary {
        Some(canary) => canary.heard().await,
        None => std::future::pending().await,
    }
}

/// What became of a state.
struct Turn {
    /// None if there was none.
    applied: Option<Result<Report, Error>>,
    attached: Result<(), Error>,
    /// What an earlier start has left and could not be taken away.
    left: Vec<Rejected>,
}

/// Brings a state into force, if there is one to be brought, and what was written before; in one go, for every way to
/// another thread and back takes as long as a small change.
async fn take_turn(node: Node, published: Option<Arc<Published>>, is_written: bool) -> (Node, Turn) {
    let work = move |node: &mut Node| {
        let applied = published.map(|it| node.apply(&it.state));
        let attached = node.attach();
        let is_there = is_written || matches!(applied, Some(Ok(_)));
        let left = if attached.is_ok() && is_there { node.retire() } else { Vec::new() };
        Turn { applied, attached, left }
    };
    in_own_thread(node, work).await
}

/// Lends the node to a thread in which it may wait inside the kernel.
async fn in_own_thread<T: Send + 'static>(
    mut node: Node,
    work: impl FnOnce(&mut Node) -> T + Send + 'static,
) -> (Node, T) {
    let work = spawn_blocking(move || {
        let result = work(&mut node);
        (node, result)
    });
    match work.await {
        Ok(done) => done,
        // Blocking work is never cancelled: it has panicked.
        Err(error) => panic::resume_unwind(error.into_panic()),
    }
}

/// A state that is in the maps.
struct Written {
    published: Arc<Published>,
    report: Report,
    begin: Instant,
}

impl Written {
    /// Says what is in force now, and what of it is not; each rejection once.
    fn tell(self, rejected: &mut BTreeSet<Rejected>, observer: &dyn Observer) {
        let Self { published, report, begin } = self;
        let took = begin.elapsed();
        observer.in_force(&published, &report, took);
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
        let now: BTreeSet<_> = report.rejected.into_iter().collect();
        for it in now.difference(rejected) {
            tracing::warn!("not served: {it}");
        }
        *rejected = now;
    }
}

/// An error with its causes, on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line
}
