//! Hands every published state to both halves of the datapath, reports what becomes of it, and attaches the programs of traces.
//!
//! Invariant: neither half waits for the state of the other; only a change of whether packets are served waits for sockets. A
//! state is active once both have it.
//! Packets that are forwarded follow the packet path, which has to expect them.

use std::{collections::BTreeSet, mem, net::IpAddr, sync::Arc};

use datapath_ebpf::{TracedPrograms, probe::Prober};
use model::error_chain;
use netlink::host_addresses::HostAddresses;
use publish::{Published, Subscription};
use tokio::{
    sync::{mpsc, oneshot},
    task::spawn_blocking,
    time::{Duration, Instant, MissedTickBehavior, interval},
};

use crate::{
    datapath::{Datapath, StaleDatapath},
    metrics::Metrics,
    observer::Observer,
    packets::{self, PacketCondition, Packets, Upkeep},
    progress::Progress,
    reports::Reports,
    socket_termination::{self, SocketTermination},
    sockets::{SocketCheck, SocketRequest, Sockets},
    worker::{Applied, Desired, Event, Failure, Worker, next_of},
};

/// Interval between the reports that do not depend on a change.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Keeps a datapath at the newest of `states`, until the publisher is gone, and serves requests for traces. What happens is reported
/// to `observer`, and counted.
///
/// A step that fails leaves the last state active, is reported, and is retried with exponential backoff, or at once with the next
/// state. Must be called within a tokio runtime.
pub async fn run(
    datapath: Datapath,
    states: Subscription,
    requests: mpsc::Receiver<TraceRequest>,
    observer: &dyn Observer,
    metrics: Metrics,
) {
    let traces = Traces { requests, ended: None };
    Halves::start(datapath, states, traces, Reports::new(observer, metrics)).run().await;
}

struct Halves<'a> {
    // `None` for a half that is off.
    sockets: Option<Worker<Sockets>>,
    packets: Option<Worker<Packets>>,
    terminated: Option<mpsc::UnboundedReceiver<socket_termination::Report>>,
    prober: Option<Prober>,
    /// What an earlier start left of a half that is off now.
    stale: StaleDatapath,
    states: Subscription,
    addresses: HostAddresses,
    interfaces: Arc<BTreeSet<IpAddr>>,
    /// The state published last; it is applied again when the host's addresses change.
    latest: Option<Arc<Published>>,
    turn: u64,
    progress: Progress,
    /// Tables of the packet path, and whether each is intact.
    tables: Vec<(&'static str, bool)>,
    /// Whether the packet path serves, as sockets were told; `None` if they were not told yet.
    packets_serve: Option<bool>,
    traces: Traces,
    reports: Reports<'a>,
}

impl<'a> Halves<'a> {
    fn start(datapath: Datapath, states: Subscription, traces: Traces, mut reports: Reports<'a>) -> Self {
        let Datapath { sockets, packets, stale } = datapath;
        let progress = Progress::new(sockets.is_some(), packets.is_some());
        let mut terminated = None;
        let sockets = sockets.map(|datapath| {
            let terminator = datapath.socket_terminator();
            let termination = match terminator {
                Ok(terminator) => {
                    let (termination, reports) = SocketTermination::start(terminator);
                    terminated = Some(reports);
                    Some(termination)
                }
                Err(error) => {
                    let error = error_chain(&error);
                    tracing::error!(error, "sockets stay connected to removed endpoints");
                    None
                }
            };
            Worker::start(Sockets::new(datapath, termination, packets.is_some()))
        });
        if let Some(packets) = &packets {
            reports.packet_path(packets.unavailable());
        }
        Self {
            sockets,
            packets: packets.map(Worker::start),
            terminated,
            prober: None,
            stale,
            states,
            addresses: HostAddresses::default(),
            interfaces: Arc::default(),
            latest: None,
            turn: 0,
            progress,
            tables: Vec::new(),
            packets_serve: None,
            traces,
            reports,
        }
    }

    async fn run(mut self) {
        if self.packets.is_none() {
            self.set_packets_serve(false).await;
        }
        if let Some(addresses) = self.addresses.poll() {
            self.interfaces = Arc::new(addresses);
        }
        let mut report = interval(REPORT_INTERVAL);
        report.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                next = self.states.next() => {
                    let Some(published) = next else { return };
                    self.latest = Some(published);
                    self.apply_latest();
                }
                addresses = self.addresses.changed() => {
                    self.interfaces = Arc::new(addresses);
                    self.apply_latest();
                }
                event = next_of(&mut self.sockets, Worker::next) => self.on_sockets(event).await,
                event = next_of(&mut self.packets, Worker::next) => self.on_packets(event).await,
                results = next_of(&mut self.prober, Prober::next) => self.reports.probed(&results),
                Some((transport, it)) = next_of(&mut self.terminated, mpsc::UnboundedReceiver::recv) => {
                    self.reports.terminated(transport, &it);
                }
                request = self.traces.next() => self.on_trace(request),
                _ = report.tick() => {
                    self.reports.summarize();
                    if self.sockets.is_none() && !self.tables.is_empty() {
                        self.reports.tables_checked(self.tables.clone());
                    }
                }
            }
        }
    }

    /// Hands the latest state to both halves, at once.
    fn apply_latest(&mut self) {
        let Some(published) = self.latest.clone() else { return };
        self.turn += 1;
        let interfaces = Arc::clone(&self.interfaces);
        let desired = Desired { turn: self.turn, published, interfaces, begin: Instant::now() };
        if let Some(sockets) = &self.sockets {
            sockets.apply(desired.clone());
        }
        if let Some(packets) = &self.packets {
            packets.apply(desired);
        }
    }

    async fn on_sockets(&mut self, event: Event<Sockets>) {
        match event {
            Event::Begun { published, .. } => self.reports.observer.on_dequeued(&published),
            Event::Attempted { applied, failures, .. } => {
                if let Some(applied) = applied.and_then(|it| self.progress.sockets_have(it)) {
                    self.report_active(applied).await;
                }
                failures.iter().for_each(|it| self.reports.sockets_failed(it));
            }
            Event::Unfinished(failure) => self.reports.sockets_failed(&failure),
            Event::Found(SocketCheck { status, tables }) => {
                // The hooks are probed once all are attached.
                if let Ok(Some(status)) = &status
                    && status.is_complete()
                {
                    self.prober.get_or_insert_with(|| Prober::start(status.cgroup.clone()));
                }
                self.reports.attach_checked(status, &self.tables);
                if let Some(avoided) = self.reports.table_stats(tables)
                    && let Some(packets) = &self.packets
                {
                    packets.request(avoided);
                }
            }
        }
    }

    async fn on_packets(&mut self, event: Event<Packets>) {
        let is_beside_sockets = self.sockets.is_some();
        match event {
            // Beside the socket path, that one has reported it.
            Event::Begun { published, is_retry } if is_retry || !is_beside_sockets => {
                self.reports.observer.on_dequeued(&published);
            }
            Event::Begun { .. } => {}
            Event::Attempted { applied, failures, condition } => {
                let PacketCondition { unavailable, tables, second_chance } = condition;
                let serve = !tables.is_empty() && tables.iter().all(|(_, is_intact)| *is_intact);
                self.set_packets_serve(serve).await;
                if let (Some(sockets), Some(applied), true) = (&self.sockets, &applied, serve) {
                    let published = Arc::clone(&applied.desired.published);
                    sockets.request(SocketRequest::PacketsHave(published, second_chance));
                }
                self.tables = tables;
                let failure = failures.last().filter(|_| is_beside_sockets);
                let behind = failure.map(|it| {
                    packets::not_served(format!("{}; its previous state stays active; retried", it.error))
                });
                let problem = behind.or(unavailable);
                self.reports.packet_path(problem.as_ref());
                // The socket path serves without it.
                let not_applied = failures.iter().find(|_| is_beside_sockets).and_then(Failure::not_applied);
                if let Some(mut applied) = applied.or(not_applied) {
                    let rejected = &mut applied.report.rejected;
                    rejected.extend(problem.clone().filter(|it| !rejected.contains(it)));
                    if let Some(applied) = self.progress.packets_have(applied) {
                        self.report_active(applied).await;
                    }
                }
                // Reported after what is active: this is what is missing of it.
                if let Some(failure) = failures.last() {
                    self.reports.packets_failed(failure, problem.as_ref(), is_beside_sockets);
                }
            }
            Event::Unfinished(failure) => self.reports.packets_failed(&failure, None, is_beside_sockets),
            Event::Found(Upkeep { affinity, has_kube_proxy_rules }) => {
                self.reports.observer.on_upkeep(affinity, has_kube_proxy_rules);
            }
        }
    }

    /// Tells sockets whether the packet path translates what they leave to it.
    async fn set_packets_serve(&mut self, serve: bool) {
        let Some(sockets) = self.sockets.as_ref().filter(|_| self.packets_serve != Some(serve)) else {
            return;
        };
        let (done, is_done) = oneshot::channel();
        sockets.request(SocketRequest::PacketsServe(serve, done));
        // Otherwise it is told again after the next attempt.
        if is_done.await == Ok(true) {
            self.packets_serve = Some(serve);
        }
    }

    /// Reports a state that both halves have now.
    async fn report_active(&mut self, mut applied: Applied) {
        // What another start left of a half that is off now is removed once its replacement is in effect.
        if !self.stale.is_removed() {
            let mut stale = mem::take(&mut self.stale);
            let removal = spawn_blocking(move || {
                let rejected = stale.remove();
                (stale, rejected)
            });
            // A panic is reported by its thread; nothing is removed then.
            if let Ok((stale, rejected)) = removal.await {
                self.stale = stale;
                applied.report.rejected.extend(rejected);
            }
        }
        self.reports.active(&applied);
    }

    /// Begins the trace that is requested; without a request, the running one has ended.
    fn on_trace(&mut self, request: Option<TraceRequest>) {
        let Some(sockets) = &self.sockets else { return };
        match request {
            Some(TraceRequest { programs, begun, ended }) => {
                // The trace before, if there is one, ends.
                sockets.request(SocketRequest::BeginTrace(Box::new(programs), begun));
                self.traces.ended = Some(ended);
            }
            None => sockets.request(SocketRequest::EndTrace),
        }
    }
}

/// A request to attach the programs of a trace.
pub struct TraceRequest {
    pub programs: TracedPrograms,
    /// Is told whether they are attached, or why not.
    pub begun: oneshot::Sender<Result<(), String>>,
    /// They are attached until its sender is dropped.
    pub ended: oneshot::Receiver<()>,
}

/// The requests for traces, and the trace that runs. The product's programs return when its reader is gone, however it ends.
struct Traces {
    requests: mpsc::Receiver<TraceRequest>,
    /// Says that the running trace has ended.
    ended: Option<oneshot::Receiver<()>>,
}

impl Traces {
    /// The next request; `None` when the running trace has ended. Cancel safe.
    async fn next(&mut self) -> Option<TraceRequest> {
        tokio::select! {
            biased;
            // Nothing is ever sent.
            _ = next_of(&mut self.ended, async |it: &mut oneshot::Receiver<()>| it.await) => {
                self.ended = None;
                None
            }
            Some(request) = self.requests.recv() => Some(request),
        }
    }
}
