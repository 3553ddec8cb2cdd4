//! The page `/trace` of `run` and `agent`: loads the traced variant of the programs, has it attached, and writes its events as
//! lines until the reader is gone.
//!
//! Invariant: the trace ends with its thread, and the thread with its reader. Lines that are not read are not kept: the ring
//! buffer fills up, and the programs count what they lose.

use std::{
    collections::HashMap,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use admin::{Admin, TraceFilters, TraceGuard};
use anyhow::{Context as _, Result, anyhow, bail};
use datapath_ebpf::{Options, TraceEvents, TraceFilter, TraceItem, TraceStep, TracedPrograms};
use model::{ServiceName, nearest};
use reconciler::TraceRequest;
use tokio::{
    sync::{mpsc, oneshot},
    task::spawn_blocking,
    time::{sleep, timeout},
};

use super::{
    filters::{Requested, described},
    line::Line,
    names::Names,
};

/// How often events are read. The programs wake no reader, so that they wait for none.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often something is written when there is no event.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Of how many decisions that are not reported steps are kept.
const MAX_DECISIONS: usize = 1024;
/// How many bytes of lines are handed over at once.
const CHUNK: usize = 32 << 10;
/// How long to wait until the programs are attached.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the end of another trace.
const PREVIOUS_TIMEOUT: Duration = Duration::from_secs(1);
/// How similar a proposed name is at least; 1 is equal.
const MIN_SIMILARITY: f64 = 0.75;

/// Lets the status pages trace, and returns the requests for the reconciler.
pub(in crate::cli) fn serve(admin: &Admin, options: &Options) -> mpsc::Receiver<TraceRequest> {
    let (sender, requests) = mpsc::channel(1);
    // The pages do not keep themselves alive.
    let tracer = Tracer { admin: admin.clone(), options: options.clone(), requests: sender };
    admin.set_tracer(move |filters| {
        let tracer = tracer.clone();
        Box::pin(async move { tracer.start(filters).await.map_err(|it| format!("{it:#}")) })
    });
    requests
}

#[derive(Clone)]
struct Tracer {
    admin: Admin,
    options: Options,
    requests: mpsc::Sender<TraceRequest>,
}

/// A trace that can begin.
struct Prepared {
    programs: TracedPrograms,
    events: TraceEvents,
    names: Names,
    service: Option<ServiceName>,
}

impl Tracer {
    /// Starts a trace, and returns its lines.
    async fn start(self, filters: TraceFilters) -> Result<mpsc::Receiver<String>> {
        let requested = Requested::parse(&filters).map_err(|it| anyhow!(it))?;
        let guard = begin(&self.admin, &described(&filters)).await?;
        let Self { admin, options, requests } = self;
        let prepared = spawn_blocking(move || prepare(&admin, &options, requested)).await??;
        let Prepared { programs, events, names, service } = prepared;
        let (begun, result) = oneshot::channel();
        let (ends, ended) = oneshot::channel();
        let request = TraceRequest { programs, begun, ended };
        let gone = "the datapath is not running: the log names the reason";
        let answer = async {
            requests.send(request).await.ok().context(gone)?;
            result.await.context(gone)
        };
        let waiting = "no state is active yet: try again when `status` shows one";
        timeout(TIMEOUT, answer).await.context(waiting)??.map_err(|it| anyhow!(it))?;
        let (lines, receiver) = mpsc::channel(1);
        let steps = HashMap::new();
        let mut forwarding = Forwarding { events, names, service, steps, lines, _guard: guard, _ends: ends };
        thread::Builder::new().name("trace".into()).spawn(move || match forwarding.run() {
            Ok(()) => tracing::info!("the trace has ended"),
            Err(error) => tracing::warn!("the trace has ended: {error:#}"),
        })?;
        tracing::info!(
            "a trace has begun{}",
            if filters.is_empty() { String::new() } else { format!(": {}", described(&filters)) }
        );
        Ok(receiver)
    }
}

/// Registers a trace. Waits a moment if another one runs, as its reader may just have gone.
async fn begin(admin: &Admin, filters: &str) -> Result<TraceGuard> {
    let begin = Instant::now();
    loop {
        match admin.begin_trace(filters.to_owned()) {
            Ok(guard) => return Ok(guard),
            Err(_) if begin.elapsed() < PREVIOUS_TIMEOUT => sleep(POLL_INTERVAL).await,
            Err(running) => {
                bail!("another trace runs {running}: one trace runs at a time, end that one first")
            }
        }
    }
}

/// Finds what the filters name, and loads the programs.
fn prepare(admin: &Admin, options: &Options, requested: Requested) -> Result<Prepared> {
    let names = Names::read(admin, options)?;
    let service = requested.service.as_deref().map(|it| find_service(admin, it)).transpose()?;
    let cgroup = match (requested.cgroup.map(PathBuf::from), requested.pod) {
        (Some(_), Some(_)) => bail!("--cgroup and --pod exclude each other: a pod is a cgroup"),
        (cgroup, None) => cgroup,
        (None, Some(uid)) => Some(names.cgroup_of_pod(&uid).with_context(|| {
            format!("no pod with the UID {uid} runs on this node: `kubectl get pod NAME --output yaml` shows its node and UID")
        })?),
    };
    let filter = TraceFilter {
        ports: service.as_ref().map(|it| names.ports_of(it)),
        address: requested.to,
        pid: requested.pid,
        cgroup,
        netns: requested.netns,
        failed_only: requested.failed,
        ends: requested.close,
        all: requested.all,
        steps: requested.steps,
    };
    let (programs, events) = TracedPrograms::load(options, &filter)?;
    Ok(Prepared { programs, events, names, service })
}

/// The Service of this name.
fn find_service(admin: &Admin, text: &str) -> Result<ServiceName> {
    let (namespace, name) = text.split_once('/').context("use NAMESPACE/NAME")?;
    let service = ServiceName::new(namespace, name);
    let state = admin.served().context("no state is active yet: try again when `status` shows one")?;
    if state.state.services.contains_key(&service) {
        return Ok(service);
    }
    let nearest = nearest(text, state.state.services.keys(), MIN_SIMILARITY);
    let nearest =
        if nearest.is_empty() { String::new() } else { format!("; nearest: {}", nearest.join(", ")) };
    bail!("there is no Service {service}{nearest}")
}

/// Writes events as lines.
struct Forwarding {
    events: TraceEvents,
    names: Names,
    /// The Service that is traced.
    service: Option<ServiceName>,
    /// The steps of decisions that were not reported yet, by the cookie of the socket.
    steps: HashMap<u64, Vec<String>>,
    lines: mpsc::Sender<String>,
    /// Dropping it has the product's programs attached again.
    _ends: oneshot::Sender<()>,
    /// Another trace may begin when this is dropped.
    _guard: TraceGuard,
}

impl Forwarding {
    /// Keeps a step until its decision is reported. It may not be: filters that need the decision come after it.
    fn on_step(&mut self, step: TraceStep) {
        if step.is_first() {
            if self.steps.len() >= MAX_DECISIONS {
                self.steps.clear();
            }
            self.steps.remove(&step.socket());
        }
        self.steps.entry(step.socket()).or_default().push(step.to_string());
    }

    /// Runs until the reader is gone.
    fn run(&mut self) -> Result<()> {
        let mut text = line(&Line::Started)?;
        let (mut lost, mut written_at) = (0, Instant::now());
        loop {
            while text.len() < CHUNK
                && let Some(event) = self.events.next()
            {
                match event {
                    TraceItem::Event(event) => {
                        let steps = self.steps.remove(&event.socket).unwrap_or_default();
                        text += &line(&self.names.line(event, steps))?;
                    }
                    TraceItem::Step(step) => self.on_step(step),
                }
            }
            let is_more = text.len() >= CHUNK;
            let total = self.events.lost()?;
            if total > lost && !is_more {
                text += &line(&Line::Lost { count: total - lost, total })?;
                lost = total;
            }
            if text.is_empty() && written_at.elapsed() >= KEEP_ALIVE_INTERVAL {
                text.push('\n');
            }
            if !text.is_empty() {
                written_at = Instant::now();
                if self.lines.blocking_send(std::mem::take(&mut text)).is_err() {
                    return Ok(());
                }
            }
            if self.lines.is_closed() {
                return Ok(());
            }
            if self.names.refresh()
                && let Some(service) = &self.service
            {
                self.events.set_ports(&self.names.ports_of(service))?;
            }
            if !is_more {
                thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

fn line(line: &Line) -> Result<String> {
    Ok(serde_json::to_string(line)? + "\n")
}
