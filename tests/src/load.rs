//! Continuous connects: each is recorded with its time and its result, and evaluated afterwards.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    Background,
    client::{Transport, request},
};

#[derive(Clone, Debug)]
pub struct ConnectSample {
    pub started: Instant,
    /// How long it took until the reply or the error.
    pub duration: Duration,
    /// The server's name, or the error.
    pub result: Result<String, String>,
}

impl ConnectSample {
    pub fn ended(&self) -> Instant {
        self.started + self.duration
    }

    pub fn is_from(&self, name: &str) -> bool {
        self.result.as_ref().is_ok_and(|it| it == name)
    }
}

#[derive(Clone, Debug, Default)]
pub struct LoadReport {
    pub connects: usize,
    pub failed: usize,
    /// The first errors.
    pub errors: Vec<String>,
    pub by_server: BTreeMap<String, usize>,
    /// The median duration of those that succeeded.
    pub p50: Duration,
    pub p99: Duration,
}

impl LoadReport {
    pub fn of<'a>(samples: impl IntoIterator<Item = &'a ConnectSample>) -> Self {
        let mut report = Self::default();
        let mut durations = Vec::new();
        for sample in samples {
            report.connects += 1;
            match &sample.result {
                Ok(name) => {
                    durations.push(sample.duration);
                    *report.by_server.entry(name.clone()).or_default() += 1;
                }
                Err(error) => report.errors.push(error.clone()),
            }
        }
        report.failed = report.errors.len();
        report.errors.truncate(5);
        durations.sort_unstable();
        let at =
            |share: usize| durations.get((durations.len() * share / 100).min(durations.len().max(1) - 1));
        report.p50 = at(50).copied().unwrap_or_default();
        report.p99 = at(99).copied().unwrap_or_default();
        report
    }
}

/// Threads that connect to one address until stopped.
#[derive(Debug)]
pub struct ConnectLoad {
    samples: Arc<Mutex<Vec<ConnectSample>>>,
    /// How many connects of each thread have ended.
    ended: Vec<Arc<AtomicUsize>>,
    threads: Background,
}

impl ConnectLoad {
    /// Starts `threads` threads in the calling thread's network namespace; each waits for `interval` between two connects.
    #[must_use]
    pub fn start(transport: Transport, address: SocketAddr, threads: usize, interval: Duration) -> Self {
        let mut load = Self { samples: Arc::default(), ended: Vec::new(), threads: Background::default() };
        for _ in 0..threads {
            let (samples, ended) = (Arc::clone(&load.samples), Arc::<AtomicUsize>::default());
            load.ended.push(Arc::clone(&ended));
            load.threads.spawn(move |stop| {
                while !stop.load(Ordering::Relaxed) {
                    let started = Instant::now();
                    let result = request(transport, address).map_err(|it| it.to_string());
                    let sample = ConnectSample { started, duration: started.elapsed(), result };
                    samples.lock().push(sample);
                    ended.fetch_add(1, Ordering::Relaxed);
                    if !interval.is_zero() {
                        thread::sleep(interval);
                    }
                }
            });
        }
        load
    }

    /// The samples so far, from index `first`.
    pub fn since(&self, first: usize) -> Vec<ConnectSample> {
        let samples = self.samples.lock();
        samples.get(first..).unwrap_or_default().to_vec()
    }

    pub fn count(&self) -> usize {
        self.samples.lock().len()
    }

    /// Waits until each thread has begun and ended a connect, so that those in progress have ended, too; `false` after `limit`.
    #[must_use]
    pub fn wait_for_new_connects(&self, limit: Duration) -> bool {
        let ended = || self.ended.iter().map(|it| it.load(Ordering::Relaxed));
        let before: Vec<_> = ended().collect();
        // The first one that ends may have started before.
        crate::eventually(limit, || ended().zip(&before).all(|(now, before)| now > before + 1))
    }

    pub fn stop(self) -> Vec<ConnectSample> {
        drop(self.threads);
        std::mem::take(&mut *self.samples.lock())
    }

    /// Stops, and checks that there were more than so many connects, and none failed.
    #[track_caller]
    pub fn stop_without_failure(self, more_than: usize) -> LoadReport {
        let report = LoadReport::of(&self.stop());
        let LoadReport { connects, failed, errors, p50, p99, .. } = &report;
        eprintln!("{connects} connects, {failed} failed, p50 {p50:?}, p99 {p99:?}");
        assert_eq!(*failed, 0, "{errors:?}");
        assert!(*connects > more_than, "{connects} connects");
        report
    }
}
