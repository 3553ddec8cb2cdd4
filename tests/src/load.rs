//! Connecting without pause, and what became of each connect.
//! The one rule: every connect is kept, with its time and its outcome; what they mean is decided afterwards.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::client::{Transport, request};

/// One connect.
#[derive(Clone, Debug)]
pub struct ConnectSample {
    /// When it began.
    pub began: Instant,
    /// How long it took until the answer, or the error, was there.
    pub took: Duration,
    /// Who answered, or the error.
    pub outcome: Result<Arc<str>, Arc<str>>,
}

impl ConnectSample {
    /// When the answer was there.
    #[must_use]
    pub fn ended(&self) -> Instant {
        self.began + self.took
    }

    /// Was the answer this name's?
    #[must_use]
    pub fn is_from(&self, name: &str) -> bool {
        self.outcome.as_ref().is_ok_and(|it| &**it == name)
    }
}

/// What many connects came to.
#[derive(Clone, Debug, Default)]
pub struct LoadReport {
    /// How many there were.
    pub connects: usize,
    /// How many of them failed.
    pub failed: usize,
    /// What the first failures said.
    pub errors: Vec<String>,
    /// How many each answered.
    pub by: BTreeMap<String, usize>,
    /// The median duration of those that succeeded.
    pub p50: Duration,
    /// The duration 99 of 100 stayed below.
    pub p99: Duration,
    /// The longest.
    pub max: Duration,
}

impl LoadReport {
    /// Counts the samples.
    pub fn of<'a>(samples: impl IntoIterator<Item = &'a ConnectSample>) -> Self {
        let mut report = Self::default();
        let mut durations = Vec::new();
        for sample in samples {
            report.connects += 1;
            match &sample.outcome {
                Ok(name) => {
                    durations.push(sample.took);
                    if let Some(count) = report.by.get_mut(&**name) {
                        *count += 1;
                    } else {
                        report.by.insert(name.to_string(), 1);
                    }
                }
                Err(error) => {
                    report.failed += 1;
                    if report.errors.len() < 5 {
                        report.errors.push(error.to_string());
                    }
                }
            }
        }
        durations.sort_unstable();
        let at =
            |share: usize| durations.get((durations.len() * share / 100).min(durations.len().max(1) - 1));
        report.p50 = at(50).copied().unwrap_or_default();
        report.p99 = at(99).copied().unwrap_or_default();
        report.max = durations.last().copied().unwrap_or_default();
        report
    }
}

/// Threads that connect to one address until stopped.
#[derive(Debug)]
pub struct ConnectLoad {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    samples: Mutex<Vec<ConnectSample>>,
}

impl ConnectLoad {
    /// Starts `threads` threads in the calling thread's network namespace; each waits for `pause` between two connects.
    #[must_use]
    pub fn start(transport: Transport, address: SocketAddr, threads: usize, pause: Duration) -> Self {
        let shared = Arc::new(Shared::default());
        let threads = (0..threads)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || connect_until_stopped(&shared, transport, address, pause))
            })
            .collect();
        Self { shared, threads }
    }

    /// The samples so far, from number `first` on.
    #[must_use]
    pub fn since(&self, first: usize) -> Vec<ConnectSample> {
        let samples = self.shared.samples.lock().unwrap_or_else(PoisonError::into_inner);
        samples.get(first..).unwrap_or_default().to_vec()
    }

    /// How many samples there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shared.samples.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Waits until `threads` more connects than now have begun and ended, so that none of before is under way.
    #[must_use]
    pub fn settle(&self, limit: Duration) -> bool {
        let now = Instant::now();
        let first = self.count();
        crate::eventually(limit, || {
            self.since(first).iter().filter(|it| it.began > now).count() > self.threads.len()
        })
    }

    /// Stops and gives back every connect.
    #[must_use]
    pub fn stop(mut self) -> Vec<ConnectSample> {
        self.end();
        std::mem::take(&mut *self.shared.samples.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A thread that panicked has left its samples.
            let _ = thread.join();
        }
    }
}

impl Drop for ConnectLoad {
    fn drop(&mut self) {
        self.end();
    }
}

fn connect_until_stopped(shared: &Shared, transport: Transport, address: SocketAddr, pause: Duration) {
    // A name is stored once, not once per connect.
    let mut known: HashMap<String, Arc<str>> = HashMap::new();
    while !shared.stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let outcome = request(transport, address);
        let took = began.elapsed();
        let mut shorten = |text: String| match known.get(&text) {
            Some(known) => Arc::clone(known),
            None => {
                let new: Arc<str> = text.as_str().into();
                known.insert(text, Arc::clone(&new));
                new
            }
        };
        let outcome = match outcome {
            Ok(name) => Ok(shorten(name)),
            Err(error) => Err(shorten(error.to_string())),
        };
        let sample = ConnectSample { began, took, outcome };
        shared.samples.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
        if !pause.is_zero() {
            thread::sleep(pause);
        }
    }
}
