//! A worker, its datapath and its reports.

use std::collections::VecDeque;

use tokio::sync::Notify;

use super::*;

/// A datapath that records its calls, and fails as it is told.
#[derive(Debug, Default)]
struct Fake {
    /// Results of the next steps that fail, by step; other steps succeed.
    failures: VecDeque<Step>,
    calls: Vec<String>,
    next_maintenance: Option<Instant>,
    maintenance_says: Option<Next>,
    changed: Arc<Notify>,
}

#[derive(Debug, thiserror::Error)]
#[error("refused")]
struct Refused;

impl Fake {
    fn step(&mut self, step: Step, call: String) -> Result<(), Refused> {
        self.calls.push(call);
        self.failures.pop_front_if(|it| *it == step).map_or(Ok(()), |_| Err(Refused))
    }
}

const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(100);

impl Datapath for Fake {
    const NAME: &str = "fake";
    type Request = Vec<Step>;
    type Finding = ();
    /// The calls so far.
    type Condition = Vec<String>;
    type Error = Refused;

    fn apply(&mut self, desired: &Desired) -> Result<ApplyReport, Refused> {
        self.step(Step::Apply, format!("apply {}", desired.turn))?;
        Ok(ApplyReport { entries: 1, ..ApplyReport::default() })
    }

    fn repair(&mut self) -> Result<(), Refused> {
        self.step(Step::Attach, "repair".into())
    }

    fn finish(&mut self) -> Result<(), Refused> {
        self.step(Step::Finish, "finish".into())
    }

    fn next_maintenance(&self) -> Instant {
        self.next_maintenance.unwrap_or_else(|| Instant::now() + MAINTENANCE_INTERVAL)
    }

    fn maintain(&mut self) -> (Option<()>, Next) {
        self.next_maintenance = Some(Instant::now() + MAINTENANCE_INTERVAL);
        (Some(()), self.maintenance_says.unwrap_or(Next::Wait))
    }

    fn serve(&mut self, failures: Vec<Step>) -> Next {
        self.failures = failures.into();
        Next::Wait
    }

    async fn changed_externally(&mut self) {
        self.changed.notified().await;
    }

    fn on_changed_externally(&mut self) -> bool {
        self.calls.push("restore".into());
        true
    }

    fn condition(&self) -> Vec<String> {
        self.calls.clone()
    }
}

/// Runs a test beside the loop of a worker, in one thread.
async fn with_worker(datapath: Fake, test: impl AsyncFnOnce(&mut Worker<Fake>)) {
    let (desired, states) = watch::channel(None);
    let (requests, queue) = mpsc::unbounded_channel();
    let (sender, events) = mpsc::unbounded_channel();
    let mut worker = Worker { desired, requests, events, thread: tokio::spawn(pending()) };
    tokio::select! {
        () = Loop::new(datapath, states, queue, sender).run() => unreachable!("the worker is not dropped"),
        () = test(&mut worker) => {}
    }
}

impl Worker<Fake> {
    /// The next attempt: the turn that became active, the steps that failed, and the calls so far.
    async fn attempt(&mut self) -> (Option<u64>, Vec<Step>, Vec<String>) {
        loop {
            match self.next().await {
                Event::Attempted { applied, failures, condition } => {
                    let steps = failures.iter().map(|it| it.step).collect();
                    return (applied.map(|it| it.desired.turn), steps, condition);
                }
                Event::Begun { .. } | Event::Found(_) | Event::Unfinished(_) => {}
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_newest_state_that_waits_is_applied_once_and_active_once_the_datapath_is_repaired() {
    with_worker(Fake::default(), async |worker| {
        worker.request(vec![Step::Attach, Step::Attach]);
        (1..=3).for_each(|turn| worker.apply(Desired::of_turn(turn)));
        for _ in 0..2 {
            assert_eq!(worker.attempt().await.0, None);
        }
        let (active, failed, calls) = worker.attempt().await;
        assert_eq!((active, failed), (Some(3), vec![]));
        assert_eq!(calls, ["apply 3", "repair", "repair", "repair"]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_newer_state_waits_for_no_retry_and_has_what_was_done_before_a_repair_failed() {
    with_worker(Fake::default(), async |worker| {
        let begin = Instant::now();
        for (turn, failing) in [(1, Step::Apply), (2, Step::Attach)] {
            worker.request(vec![failing]);
            worker.apply(Desired::of_turn(turn));
            let (active, failed, _) = worker.attempt().await;
            assert_eq!((active, failed), (None, vec![failing]));
        }
        worker.apply(Desired::of_turn(3));
        let applied = loop {
            if let Event::Attempted { applied, .. } = worker.next().await {
                break applied.unwrap();
            }
        };
        assert_eq!((applied.desired.turn, applied.report.entries), (3, 2));
        assert_eq!(begin.elapsed(), Duration::ZERO);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_finish_is_retried_without_another_apply() {
    with_worker(Fake::default(), async |worker| {
        worker.request(vec![Step::Finish]);
        worker.apply(Desired::of_turn(1));
        assert_eq!(worker.attempt().await.0, Some(1));
        assert!(matches!(worker.next().await, Event::Unfinished(Failure { step: Step::Finish, .. })));
        assert_eq!(worker.attempt().await.2, ["apply 1", "repair", "finish", "repair"]);
        // Finished: what follows is a new state.
        worker.apply(Desired::of_turn(2));
        let calls = worker.attempt().await.2;
        assert_eq!(calls[4..], ["finish", "apply 2", "repair"]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn only_an_attempt_after_a_failed_one_is_a_retry() {
    let fake = Fake { maintenance_says: Some(Next::Apply), ..Fake::default() };
    with_worker(fake, async |worker| {
        worker.request(vec![Step::Apply]);
        worker.apply(Desired::of_turn(1));
        // It fails, is retried, and is applied again by maintenance.
        for expect in [false, true, false] {
            let is_retry = loop {
                if let Event::Begun { is_retry, .. } = worker.next().await {
                    break is_retry;
                }
            };
            assert_eq!(is_retry, expect);
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_external_change_is_repaired_at_once_also_while_a_retry_is_scheduled() {
    let changed = Arc::new(Notify::new());
    let fake = Fake { changed: Arc::clone(&changed), ..Fake::default() };
    with_worker(fake, async |worker| {
        worker.request(vec![Step::Apply; 9]);
        worker.apply(Desired::of_turn(1));
        for _ in 0..8 {
            assert_eq!(worker.attempt().await.1, [Step::Apply]);
        }
        let begin = Instant::now();
        changed.notify_one();
        let (_, _, calls) = worker.attempt().await;
        assert_eq!(begin.elapsed(), BACKOFF_MIN, "the retry is due in {:?}", 128 * BACKOFF_MIN);
        assert_eq!(calls[calls.len() - 3..], ["restore", "apply 1", "repair"]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_apply_is_retried_with_growing_delays_which_maintenance_does_not_precede() {
    let fake = Fake { maintenance_says: Some(Next::Repair), ..Fake::default() };
    with_worker(fake, async |worker| {
        assert_eq!(worker.attempt().await, (None, vec![], vec!["repair".to_owned()]));
        // Maintenance is due between the last two retries.
        worker.request(vec![Step::Apply; 12]);
        let begin = Instant::now();
        worker.apply(Desired::of_turn(1));
        let mut expect = 0;
        for delay in (0..12).map(|it| (50 << it).min(30_000)) {
            assert_eq!(worker.attempt().await.1, [Step::Apply]);
            let passed = begin.elapsed().as_millis();
            assert!((expect..expect + 20).contains(&passed), "{passed} ms instead of {expect}");
            expect += delay;
        }
        assert!(expect > MAINTENANCE_INTERVAL.as_millis());
        assert_eq!(worker.attempt().await.0, Some(1));
    })
    .await;
}
