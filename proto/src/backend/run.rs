//! The loop of a backend: states in, applies with retries, checks of what was applied.

use std::{
    collections::BTreeSet,
    fmt::Display,
    future::{Future, pending},
    io,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use tokio::time::{Instant, sleep_until};

use super::{
    Flags,
    health_checks::HealthChecks,
    http::{Answer, Server},
    metrics::Metrics,
    signals,
};
use crate::{
    client::{Client, NodeChange, State},
    localv1::Extension,
};

/// The waits between attempts to apply a state.
const RETRIES: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(200))
    .with_max_delay(Duration::from_secs(30));

/// How often what is not served is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// What programs a node.
pub trait Backend: Send {
    /// The extensions that it requests, beside `Revisions` and `ConflictingAddresses`.
    const EXTENSIONS: &[Extension] = &[];

    /// Why a state cannot be applied: what failed, and the remedy.
    type Error: Display + Send;

    /// Makes the node behave as `state` says, all at one moment if it can. `changed` is what differs from the last state that
    /// was applied. Returns what of the state is not served, and why; while there is any, it is called again every 5 s, without
    /// a change.
    ///
    /// # Errors
    ///
    /// The former state stays active; the newest is applied again, after a wait that grows to 30 s.
    fn apply(
        &mut self,
        state: &State,
        changed: Changed<'_>,
    ) -> impl Future<Output = Result<Vec<NotServed>, Self::Error>> + Send;

    /// Whether what was applied is still there; if not, everything is applied again.
    ///
    /// # Errors
    ///
    /// It cannot be found out; that is logged.
    fn is_intact(&mut self) -> impl Future<Output = Result<bool, Self::Error>> + Send {
        async { Ok(true) }
    }
}

/// What of a state must be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed<'a> {
    /// Everything: nothing was applied yet, or something else has changed it, or the last apply failed.
    Everything,
    /// These Services, by `namespace/name`; those that the state does not have were deleted.
    Services(&'a BTreeSet<Arc<str>>),
}

/// A part of a state that is not served.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NotServed {
    /// The Service, as `namespace/name`.
    pub service: Arc<str>,
    /// Why, and what can be done about it.
    pub reason: String,
}

/// Why a backend ended: what failed, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RunError(pub String);

/// Runs a backend as a program: installs the log, and runs it until SIGTERM or Ctrl-C. An error is printed.
pub async fn main<B: Backend>(flags: &Flags, backend: &mut B) -> ExitCode {
    flags.install_log();
    let ended = signals::ended();
    exit_code(run(flags, backend, ended).await)
}

/// The exit code of a program with this result; an error is printed.
pub fn exit_code(result: Result<(), impl Display>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a backend until `ended` is ready; with `--once`, until one state is applied. An apply is never broken off.
///
/// # Errors
///
/// The flags cannot be used, a page cannot be served, or, with `--once`, the state cannot be applied.
pub async fn run<B: Backend>(
    flags: &Flags,
    backend: &mut B,
    ended: impl Future<Output = io::Result<()>>,
) -> Result<(), RunError> {
    let client = flags.client.client().map_err(|it| RunError(it.to_string()))?;
    let client = client.request_extensions([Extension::ConflictingAddresses]);
    let client = client.request_extensions(B::EXTENSIONS.iter().copied());
    let metrics = Arc::new(Metrics::new());
    let is_once = flags.client.once;
    let _pages = if is_once { Vec::new() } else { pages(flags, &client, &metrics).await? };
    tokio::pin!(ended);
    let mut changes = client.changes();
    let mut applier = Applier::new(backend, metrics);
    let mut due = None;
    loop {
        let applied = tokio::select! {
            it = &mut ended => return it.map_err(|it| RunError(format!("cannot receive signals: {it}"))),
            change = changes.next() => {
                changes.unconfirmed();
                applier.take(change);
                applier.apply().await
            }
            () = until(due) => applier.keep().await,
        };
        let wait = match applied {
            Ok(()) if is_once => return Ok(()),
            Err(error) if is_once => return Err(RunError(format!("cannot apply the state: {error}"))),
            Ok(()) => {
                changes.confirm();
                if applier.not_served.is_empty() {
                    flags.sync_period
                } else {
                    flags.sync_period.min(RETRY_INTERVAL)
                }
            }
            Err(_) => applier.retries.next().unwrap_or(flags.sync_period),
        };
        due = Some(Instant::now() + wait);
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(it) => sleep_until(it).await,
        None => pending().await,
    }
}

async fn pages(flags: &Flags, client: &Client, metrics: &Arc<Metrics>) -> Result<Vec<Server>, RunError> {
    let mut servers = Vec::new();
    let all = [
        ("/healthz", "--healthz-bind-address", flags.healthz_bind_address),
        ("/metrics", "--metrics-bind-address", flags.metrics_bind_address),
    ];
    for (page, flag, address) in all {
        let Some(address) = address else { continue };
        let (metrics, outage) = (Arc::clone(metrics), client.outage());
        let answer = move |path: &str| match path {
            _ if path != page => Answer::not_found(),
            "/healthz" => metrics.healthz(outage.borrow().as_deref()),
            _ => metrics.page(outage.borrow().is_none()),
        };
        let server = Server::start(address, answer).await;
        servers.push(server.map_err(|it| RunError(format!("{flag} {address}: {it}")))?);
    }
    Ok(servers)
}

/// The newest state, and what of it is applied.
struct Applier<'a, B> {
    backend: &'a mut B,
    metrics: Arc<Metrics>,
    health_checks: HealthChecks,
    state: State,
    /// The Services that differ from the state that was applied last.
    changed: BTreeSet<Arc<str>>,
    /// Whether everything must be written.
    is_stale: bool,
    not_served: BTreeSet<NotServed>,
    /// The waits after failures; a success begins it anew.
    retries: ExponentialBackoff,
}

impl<'a, B: Backend> Applier<'a, B> {
    fn new(backend: &'a mut B, metrics: Arc<Metrics>) -> Self {
        Self {
            backend,
            metrics,
            health_checks: HealthChecks::default(),
            state: State::default(),
            changed: BTreeSet::new(),
            is_stale: true,
            not_served: BTreeSet::new(),
            retries: RETRIES.build(),
        }
    }

    /// Makes the difference part of the newest state.
    fn take(&mut self, change: NodeChange) {
        self.changed.extend(change.services.keys().cloned());
        self.state.apply(change);
    }

    async fn apply(&mut self) -> Result<(), String> {
        let begin = Instant::now();
        let changed = if self.is_stale { Changed::Everything } else { Changed::Services(&self.changed) };
        let applied = self.backend.apply(&self.state, changed).await;
        self.health_checks.serve(&self.state).await;
        let not_served = applied.map_err(|it| {
            let error = it.to_string();
            tracing::error!(error, "cannot apply the state; the former one stays active");
            self.metrics.failed(error.clone());
            self.is_stale = true;
            error
        })?;
        let took = begin.elapsed();
        let (services, changed) = (self.state.services.len(), self.changed.len());
        self.metrics.applied(took, services, not_served.len());
        if self.is_stale || changed > 0 {
            tracing::info!(services, changed, everything = self.is_stale, ?took, "applied");
        }
        self.log_not_served(not_served);
        (self.is_stale, self.retries) = (false, RETRIES.build());
        self.changed.clear();
        Ok(())
    }

    /// Applies the newest state again if that failed before, if parts of it are not served, or if something else has changed what
    /// was applied.
    async fn keep(&mut self) -> Result<(), String> {
        if !self.is_stale {
            match self.backend.is_intact().await {
                Ok(true) if self.not_served.is_empty() => return Ok(()),
                Ok(true) => {}
                Ok(false) => {
                    tracing::warn!("something else has changed what was applied; it is written again");
                    self.metrics.repaired();
                    self.is_stale = true;
                }
                Err(error) => {
                    let error = error.to_string();
                    tracing::warn!(error, "cannot find out whether what was applied is still there");
                    return Err(error);
                }
            }
        }
        self.apply().await
    }

    /// Logs what is new among the parts that are not served.
    fn log_not_served(&mut self, all: Vec<NotServed>) {
        let all = BTreeSet::from_iter(all);
        for NotServed { service, reason } in all.difference(&self.not_served) {
            tracing::warn!(%service, reason, "not served");
        }
        self.not_served = all;
    }
}
