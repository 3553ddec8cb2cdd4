//! Connects to ejected endpoints before a client does, so that no client has to find out that one is still dead.
//!
//! Invariant: a trial only prolongs an ejection, up to the longest one after the client's last failure. Then the client
//! itself tries: what the node cannot reach may be open to the client. Without this process, clients try as they always do.

use std::{
    collections::{HashMap, HashSet},
    io,
    net::SocketAddr,
    time::Duration,
};

use datapath::PassiveHealthOptions;
use proxy_common::{
    counters::CounterIndex,
    health::{FailureKey, FailureRecord, key_parts},
};
use socket2::{Domain, Socket, Type};

/// How long before the end of an ejection its endpoint is tried.
const LEAD: Duration = Duration::from_secs(5);
/// How long the ejection then lasts at least, if the endpoint did not answer.
const PROLONGED: Duration = Duration::from_secs(8);
/// How long an endpoint has time to answer. Ends of trials are looked for every second.
const TIME_TO_ANSWER: Duration = Duration::from_millis(900);
/// Between two trials of an endpoint.
const TRIAL_INTERVAL: Duration = Duration::from_secs(3);
/// How many trials may run at once. The clients try further endpoints.
const MAX_TRIALS: usize = 256;

pub(crate) struct TrialConnects {
    max_ejection_time: Duration,
    /// The endpoints of the counters in the records.
    endpoints: HashMap<CounterIndex, SocketAddr>,
    trials: HashMap<SocketAddr, Trial>,
}

/// The last trial of an endpoint.
struct Trial {
    began: Duration,
    /// What its connect returned; `None` once the outcome is known.
    connect: Option<io::Result<Socket>>,
}

impl TrialConnects {
    pub(crate) fn new(options: PassiveHealthOptions) -> Self {
        let max_ejection_time = options.max_ejection_time;
        Self { max_ejection_time, endpoints: HashMap::new(), trials: HashMap::new() }
    }

    /// Forgets the endpoints of these counters, which may get others.
    pub(crate) fn forget(&mut self, counters: &[CounterIndex]) {
        for it in counters {
            self.endpoints.remove(it);
        }
    }

    /// Ends and begins trials; returns the records whose ejections are prolonged. `records` are those of ejected endpoints,
    /// `now` is a time of their clock, `endpoints_of` looks up the endpoints of counters.
    pub(crate) fn step(
        &mut self,
        now: Duration,
        records: &[(FailureKey, FailureRecord)],
        endpoints_of: impl FnOnce(&HashSet<CounterIndex>) -> HashMap<CounterIndex, SocketAddr>,
    ) -> Vec<(FailureKey, FailureRecord)> {
        let due: Vec<_> = records.iter().filter(|(_, it)| self.is_due(it, now)).collect();
        let counters: HashSet<_> = records.iter().map(|(key, _)| key_parts(*key).1).collect();
        self.endpoints.retain(|counter, _| counters.contains(counter));
        let due_counters = due.iter().map(|(key, _)| key_parts(*key).1);
        let unknown: HashSet<_> = due_counters.filter(|it| !self.endpoints.contains_key(it)).collect();
        if !unknown.is_empty() {
            self.endpoints.extend(endpoints_of(&unknown));
        }
        let failed = self.end(now);
        let mut prolonged = Vec::new();
        for (key, record) in due {
            let Some(&endpoint) = self.endpoints.get(&key_parts(*key).1) else { continue };
            if failed.contains(&endpoint) {
                let until = (now + PROLONGED).min(self.last_end(record)).as_nanos() as u64;
                prolonged.push((*key, FailureRecord { until, is_on_trial: 0, ..*record }));
            } else {
                self.begin(endpoint, now);
            }
        }
        prolonged
    }

    /// Whether a client will soon try the endpoint of a record, and none does so now.
    fn is_due(&self, record: &FailureRecord, now: Duration) -> bool {
        let until = Duration::from_nanos(record.until);
        until <= now + LEAD && until < self.last_end(record) && (record.is_on_trial == 0 || until <= now)
    }

    /// When a client is to try the endpoint of a record in any case.
    fn last_end(&self, record: &FailureRecord) -> Duration {
        Duration::from_nanos(record.last) + self.max_ejection_time
    }

    /// Begins a trial of an endpoint, unless there is one, or has been.
    fn begin(&mut self, endpoint: SocketAddr, now: Duration) {
        if self.trials.len() < MAX_TRIALS && !self.trials.contains_key(&endpoint) {
            self.trials.insert(endpoint, Trial { began: now, connect: Some(connect(endpoint)) });
        }
    }

    /// The endpoints that did not answer. Forgets trials that another one may follow.
    fn end(&mut self, now: Duration) -> HashSet<SocketAddr> {
        let mut failed = HashSet::new();
        self.trials.retain(|endpoint, trial| {
            if let Some(connect) = &trial.connect {
                let has_failed = match connect {
                    Ok(socket) => has_failed(socket),
                    // Others are the node's own: they say nothing of the endpoint.
                    Err(error) => Some(error.kind() == io::ErrorKind::ConnectionRefused),
                };
                let has_failed = has_failed.or((trial.began + TIME_TO_ANSWER <= now).then_some(true));
                if let Some(has_failed) = has_failed {
                    tracing::debug!(%endpoint, has_failed, "an ejected endpoint was tried");
                    trial.connect = None;
                    if has_failed {
                        failed.insert(*endpoint);
                    }
                }
            }
            trial.connect.is_some() || trial.began + TRIAL_INTERVAL > now
        });
        failed
    }
}

fn connect(endpoint: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(endpoint), Type::STREAM.nonblocking().cloexec(), None)?;
    match socket.connect(&endpoint.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket),
    }
}

/// Whether a connect has failed; `None` while it is not known.
fn has_failed(socket: &Socket) -> Option<bool> {
    match socket.take_error() {
        Ok(None) => socket.peer_addr().is_ok().then_some(false),
        _ => Some(true),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{Ipv4Addr, TcpListener},
        thread,
    };

    use proxy_common::health::key;

    use super::*;
    use crate::fixtures::passive_health;

    const NOW: Duration = Duration::from_secs(1_000);
    const SECOND: Duration = Duration::from_secs(1);

    fn trials() -> TrialConnects {
        TrialConnects::new(passive_health(1, 1))
    }

    /// A record of an endpoint that failed so long ago, and is ejected for so long.
    fn record(failed: u32, ejected: u32) -> FailureRecord {
        let nanos = |it: Duration| it.as_nanos() as u64;
        let (last, until) = (nanos(NOW - SECOND * failed), nanos(NOW + SECOND * ejected));
        FailureRecord { last, until, timeouts: 3, ejections: 1, ..FailureRecord::default() }
    }

    /// How long an ejection still lasts, in seconds, after a trial of an endpoint; `None` if nothing was changed.
    fn tried(endpoint: SocketAddr, record: FailureRecord) -> Option<f64> {
        let mut trials = trials();
        let records = [(key(1, 7), record)];
        let endpoints = |of: &HashSet<_>| of.iter().map(|it| (*it, endpoint)).collect();
        assert_eq!(trials.step(NOW, &records, endpoints), []);
        thread::sleep(Duration::from_millis(100));
        let prolonged = trials.step(NOW + SECOND, &records, |_| panic!("the endpoint is known"));
        let (_, now) = prolonged.first()?;
        assert_eq!(FailureRecord { until: 0, ..*now }, FailureRecord { until: 0, ..record });
        Some((Duration::from_nanos(now.until) - NOW - SECOND).as_secs_f64())
    }

    fn refusing() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.local_addr().unwrap()
    }

    #[test]
    fn an_ejection_is_prolonged_when_it_is_about_to_end_and_its_endpoint_does_not_answer() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        full.listen(0).unwrap();
        let full_at = full.local_addr().unwrap().as_socket().unwrap();
        let _queued: Vec<_> = (0..10).map(|_| connect(full_at).unwrap()).collect();
        let on_trial = FailureRecord { is_on_trial: 1, ..record(3, 2) };
        // Without an endpoint, one that refuses.
        for (what, endpoint, record, expect) in [
            ("refused", None, record(3, 2), Some(8.0)),
            ("no room in its queue", Some(full_at), record(3, 2), Some(8.0)),
            ("it answers", Some(listener.local_addr().unwrap()), record(3, 2), None),
            ("to 60 s after the failure, the longest time", None, record(56, 2), Some(3.0)),
            ("it has lasted that long", None, record(60, 0), None),
            ("not yet", None, record(3, 30), None),
            ("a client tries it now", None, on_trial, None),
        ] {
            assert_eq!(tried(endpoint.unwrap_or_else(refusing), record), expect, "{what}");
        }
    }

    #[test]
    fn an_endpoint_is_tried_once_for_all_of_its_clients() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let endpoint = listener.local_addr().unwrap();
        let records = [1, 2, 3].map(|client| (key(client, 7), record(3, 2)));
        let mut trials = trials();
        for second in 0..3 {
            trials.step(NOW + SECOND * second, &records, |_| HashMap::from([(7, endpoint)]));
        }
        thread::sleep(Duration::from_millis(100));
        assert!(listener.accept().is_ok());
        assert!(listener.accept().is_err());
    }
}
