//! The page `/trace` of `run` and `agent`: loads the traced variant of the programs, has it attached, and writes its events, and
//! those of packets, as lines until the reader is gone.
//!
//! Invariant: the trace ends with its thread, and the thread with its reader. Lines that are not read are not kept: the ring
//! buffer fills up, and the programs count what they lose.

use std::{
    num::NonZeroU32,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use admin::{Admin, TraceFilters, TraceGuard};
use anyhow::{Context as _, Result, anyhow, bail};
use datapath_ebpf::{self as ebpf, TraceEvents, TraceFilter, TraceVerdict, TracedPrograms};
use log::Level;
use model::{ServiceName, error_chain, nearest};
use reconciler::{Options, TraceRequest};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
    task::spawn_blocking,
    time::{sleep, timeout},
};

use super::{
    filters::{Filters, described},
    line::Line,
    names::Names,
    packets::Packets,
};

/// How often events are read. The programs wake no reader, so that they wait for none.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often something is written when there is no event.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
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
    admin.set_readers(|it| {
        it.tracer = Some(Arc::new(move |filters| {
            let tracer = tracer.clone();
            Box::pin(async move { tracer.start(filters).await.map_err(|it| format!("{it:#}")) })
        }));
    });
    requests
}

#[derive(Clone)]
struct Tracer {
    admin: Admin,
    options: Options,
    requests: mpsc::Sender<TraceRequest>,
}

impl Tracer {
    async fn start(self, filters: TraceFilters) -> Result<mpsc::Receiver<String>> {
        let requested = Filters::parse(&filters).map_err(|it| anyhow!(it))?;
        let guard = begin(&self.admin, &described(&filters), requested.replace).await?;
        let requests = self.requests.clone();
        let (programs, sockets, packets) = spawn_blocking(move || self.prepare(requested)).await??;
        let (ends, ended) = oneshot::channel();
        if let Some(programs) = programs {
            attach(&requests, programs, ended).await?;
        }
        let (lines, receiver) = mpsc::channel(1);
        let mut forwarding =
            Forwarding { sockets, packets, lines, runtime: Handle::current(), guard, _ends: ends };
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

    /// Finds what the filters name, loads the programs, and has the kernel report packets.
    fn prepare(
        &self,
        requested: Filters,
    ) -> Result<(Option<TracedPrograms>, Option<Sockets>, Option<Packets>)> {
        if let Some(service) = &requested.service {
            check_service(&self.admin, service)?;
        }
        let packets = match self.options.packets {
            Some(_) => Packets::start(&self.admin, &requested, self.options.sockets.as_ref())?,
            None => None,
        };
        let load = |options| Sockets::load(&self.admin, options, requested);
        let (programs, sockets) = self.options.sockets.as_ref().map(load).transpose()?.unzip();
        if sockets.is_none() && packets.is_none() {
            bail!("this process serves packets only: give --service or --to, and no filter for processes");
        }
        Ok((programs, sockets, packets))
    }
}

/// Registers a trace. Waits a moment if another one runs, as its reader may just have gone; longer if that one is replaced.
async fn begin(admin: &Admin, filters: &str, replaces: bool) -> Result<TraceGuard> {
    let begin = Instant::now();
    let limit = if replaces { TIMEOUT } else { PREVIOUS_TIMEOUT };
    loop {
        match admin.begin_trace(filters.to_owned()) {
            Ok(guard) => return Ok(guard),
            Err(_) if begin.elapsed() < limit => {
                if replaces {
                    admin.replace_trace();
                }
                sleep(POLL_INTERVAL).await;
            }
            Err(running) => bail!(
                "another trace runs {running}: one trace runs at a time, end that one first, or give --replace"
            ),
        }
    }
}

/// Has the programs attached until `ended` is dropped.
async fn attach(
    requests: &mpsc::Sender<TraceRequest>,
    programs: TracedPrograms,
    ended: oneshot::Receiver<()>,
) -> Result<()> {
    let (begun, result) = oneshot::channel();
    let request = TraceRequest { programs, begun, ended };
    let gone = "the datapath is not running: the log names the reason";
    let answer = async {
        requests.send(request).await.ok().context(gone)?;
        result.await.context(gone)
    };
    let waiting = "no state is active yet: try again when `status` shows one";
    timeout(TIMEOUT, answer).await.context(waiting)??.map_err(|it| anyhow!(it))
}

/// An unknown Service is an error that names similar ones.
fn check_service(admin: &Admin, service: &ServiceName) -> Result<()> {
    let state = admin.served().context("no state is active yet: try again when `status` shows one")?;
    if state.state.services.contains_key(service) {
        return Ok(());
    }
    let nearest = nearest(&service.to_string(), state.state.services.keys(), MIN_SIMILARITY);
    let nearest =
        if nearest.is_empty() { String::new() } else { format!("; nearest: {}", nearest.join(", ")) };
    bail!("there is no Service {service}{nearest}")
}

/// The events of sockets as lines.
struct Sockets {
    events: TraceEvents,
    names: Names,
    failed_only: bool,
    /// Whether all datagrams are shown that pass.
    has_all: bool,
    service: Option<ServiceName>,
    /// How many events were reported as lost.
    lost: u64,
    lost_steps: u64,
}

impl Sockets {
    /// Finds what the filters name, and loads the programs.
    fn load(admin: &Admin, options: &ebpf::Options, requested: Filters) -> Result<(TracedPrograms, Self)> {
        let names = Names::read(admin, options)?;
        let cgroup = match (requested.cgroup, requested.pod) {
            (Some(_), Some(_)) => bail!("--cgroup and --pod exclude each other: a pod is a cgroup"),
            (cgroup, None) => cgroup,
            (None, Some(uid)) => Some(names.cgroups.of_pod(&uid).with_context(|| {
                format!("no pod with the UID {uid} runs on this node: `kubectl get pod NAME --output yaml` shows its node and UID")
            })?),
        };
        let (failed_only, has_all) = (requested.failed, requested.all || requested.to.is_some());
        let filter = TraceFilter {
            ports: requested.service.as_ref().map(|it| names.ports_of(it)),
            address: requested.to,
            pid: requested.pid.map(NonZeroU32::get),
            cgroup,
            netns: requested.netns,
            failed_only,
            ends: requested.close,
            all: requested.all,
            steps: match requested.verbosity {
                0 => None,
                1 => Some(Level::Debug),
                _ => Some(Level::Trace),
            },
        };
        let (programs, events) = TracedPrograms::load(options, &filter)?;
        if let Some(reason) = &events.refused_steps {
            tracing::info!("this kernel has no room for the steps of a trace: {}", error_chain(reason));
        }
        Ok((
            programs,
            Self { events, names, failed_only, has_all, service: requested.service, lost: 0, lost_steps: 0 },
        ))
    }

    /// The line that says why there are no steps, if they were asked for.
    fn refused_steps(&mut self) -> Result<String> {
        let refused = self.events.refused_steps.take();
        refused.map_or_else(|| Ok(String::new()), |it| line(&Line::NoSteps { reason: error_chain(&it) }))
    }

    /// Appends what has come; returns whether there is more.
    fn write(&mut self, text: &mut String) -> Result<bool> {
        let (events, is_more) = self.events.read()?;
        for event in events {
            let passed = matches!(event.verdict, TraceVerdict::Passed | TraceVerdict::Excluded);
            let reason =
                passed.then(|| self.names.cluster_ip_failure(event.destination, event.protocol)).flatten();
            // A datagram to another address may be the reply of a server.
            let is_shown = if self.failed_only {
                reason.is_some() && event.verdict == TraceVerdict::Passed
            } else {
                event.is_connect || self.has_all || reason.is_some()
            };
            if !passed || is_shown {
                *text += &line(&self.names.line(event, reason))?;
            }
        }
        if is_more {
            return Ok(true);
        }
        let total = self.events.lost()?;
        if total > self.lost {
            *text += &line(&Line::Lost { count: total - self.lost, total })?;
            self.lost = total;
        }
        let total = self.events.lost_steps();
        if total > self.lost_steps {
            *text += &line(&Line::StepsLost { count: total - self.lost_steps, total })?;
            self.lost_steps = total;
        }
        if self.names.refresh()
            && let Some(service) = &self.service
        {
            self.events.set_ports(&self.names.ports_of(service))?;
        }
        Ok(false)
    }
}

struct Forwarding {
    sockets: Option<Sockets>,
    packets: Option<Packets>,
    lines: mpsc::Sender<String>,
    /// Waits for the reader.
    runtime: Handle,
    /// Dropping it has the product's programs attached again.
    _ends: oneshot::Sender<()>,
    /// Another trace may begin when this is dropped.
    guard: TraceGuard,
}

impl Forwarding {
    /// Runs until the reader is gone, or another trace replaces this one.
    fn run(&mut self) -> Result<()> {
        let mut text = line(&Line::Started)?;
        if let Some(sockets) = &mut self.sockets {
            text += &sockets.refused_steps()?;
        }
        let mut written_at = Instant::now();
        loop {
            let mut is_more = match &mut self.sockets {
                Some(sockets) => sockets.write(&mut text)?,
                None => false,
            };
            if let Some(packets) = &mut self.packets {
                packets.refresh()?;
                while !is_more && let Some(it) = packets.poll()? {
                    text += &line(&it)?;
                    is_more = text.len() >= CHUNK;
                }
            }
            if text.is_empty() && written_at.elapsed() >= KEEP_ALIVE_INTERVAL {
                text.push('\n');
            }
            if !text.is_empty() {
                written_at = Instant::now();
                // A reader that does not read may keep this one waiting, but not another one.
                let Self { lines, guard, runtime, .. } = self;
                let text = std::mem::take(&mut text);
                runtime.block_on(async {
                    tokio::select! {
                        _ = lines.send(text) => {}
                        () = guard.replaced() => {}
                    }
                });
            }
            if self.lines.is_closed() {
                return Ok(());
            }
            if self.guard.is_replaced() {
                bail!("another one has replaced it");
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
