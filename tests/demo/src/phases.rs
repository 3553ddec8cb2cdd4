//! What the demo shows, one function each.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use tests::{
    ConnectLoad, EchoConnection, Transport, connect_error,
    load::{ConnectSample, LoadReport},
    request,
};

use crate::{
    PATIENCE, Stage, interrupt,
    manifests::MOST,
    screen::{duration, heading, line, number, share, table},
};

/// How often each address is asked in the first phase.
const QUESTIONS: usize = 1_000;
/// How long each step under load is watched.
const STEP: Duration = Duration::from_millis(1_500);
/// Each address is asked by so many threads, with so much time between two connects.
const THREADS: usize = 2;
const PAUSE: Duration = Duration::from_micros(200);
/// How often a Service without endpoints is tried.
const REFUSALS: usize = 200;

/// 1: who answers at each address, beside what the manifests say.
pub(crate) fn every_service_answers(stage: &mut Stage) -> Result<()> {
    heading("1", "Every Service answers at every address, by every endpoint of its manifest");
    let mut rows = Vec::new();
    let mut all = Vec::new();
    let client = stage.topology.client()?;
    for service in stage.manifests.services().filter(|it| !it.endpoints.is_empty()) {
        for address in service.addresses() {
            let samples = questions(service.transport, address)?;
            let report = LoadReport::of(&samples);
            let expected = service.behind(address);
            let names: Vec<_> = expected.iter().map(|(name, _)| name.clone()).collect();
            let mut first = (service.name.clone(), show(service.transport, address));
            for (name, pod) in expected {
                let count = report.by.get(name).copied().unwrap_or_default();
                let (service, at) = std::mem::take(&mut first);
                rows.push(vec![
                    service,
                    at,
                    name.clone(),
                    pod.to_string(),
                    number(count),
                    share(count, report.connects),
                ]);
                if count == 0 {
                    bail!(
                        "{name} at {pod} never answered for {address}: {:?} {:?}",
                        report.by,
                        report.errors
                    );
                }
            }
            stage.tally.add(&report, &names);
            all.extend(samples);
        }
    }
    drop(client);
    table(&["Service", "Address", "Endpoint in the manifest", "at", "Answered", "Share"], &[4, 5], &rows);
    let report = LoadReport::of(&all);
    line(&format!(
        "{} connects, {} failed; a question and its answer took {} (median), {} (99 %).",
        number(report.connects),
        number(report.failed),
        duration(report.p50),
        duration(report.p99),
    ));
    line("Half of the UDP questions came by sendto(2): their answers bear the Service's address, too.");
    Ok(())
}

fn questions(transport: Transport, address: SocketAddr) -> Result<Vec<ConnectSample>> {
    let mut samples = Vec::new();
    for question in 0..QUESTIONS {
        interrupt::check()?;
        let transport = match transport {
            Transport::Udp if question % 2 == 1 => Transport::UdpUnconnected,
            other => other,
        };
        let began = Instant::now();
        let outcome = request(transport, address);
        let outcome = outcome.map(Into::into).map_err(|it| it.to_string().into());
        samples.push(ConnectSample { began, took: began.elapsed(), outcome });
    }
    Ok(samples)
}

/// 2: the Service scales while it is used.
pub(crate) fn scaling_under_load(stage: &mut Stage) -> Result<()> {
    let mut names = stage.names_of_web()?;
    heading(
        "2",
        &format!(
            "web scales {} → 1 → {MOST} by an edit of its manifest, under load ({} threads)",
            names.len(),
            THREADS * 2
        ),
    );
    let load = Loads::start(stage)?;
    let mut rows = Vec::new();

    let began = Instant::now();
    interrupt::sleep(STEP / 2)?;
    let report = load.report(began, Instant::now());
    stage.tally.add(&report, &names);
    rows.push(Row::new(&format!("{} endpoints", names.len()), "", report));

    for count in [1, MOST] {
        let (edited, new) = stage.manifests.scale_web(count)?;
        let (samples, visible) = until_visible(&load, edited, &names, &new)?;
        let visible = visible.saturating_duration_since(edited);
        let change = format!("{} → {count}", names.len());

        // Until it is visible the old endpoints may answer too, afterwards only the new.
        let (before, after): (Vec<_>, Vec<_>) = samples.iter().partition(|it| it.began < edited + visible);
        let both: Vec<_> = names.iter().chain(&new).cloned().collect();
        stage.tally.add(&LoadReport::of(before), &both);
        let after = LoadReport::of(after);
        stage.tally.add(&after, &new);
        rows.push(Row { by: after, ..Row::new(&change, &duration(visible), LoadReport::of(&samples)) });
        names = new;
    }
    let report = LoadReport::of(&load.stop());
    table(
        &["Change", "Visible after", "Connects", "Failed", "Answered from then on by"],
        &[1, 2, 3],
        &Row::cells(rows),
    );
    line(
        "Visible: from the rename of the file to the last answer by a removed endpoint, or the first by a new one.",
    );
    line(&format!("A connect took {} (median), {} (99 %).", duration(report.p50), duration(report.p99)));
    Ok(())
}

/// Waits a step, and on a busy machine as many as it takes, for a change to show: what was asked meanwhile, and when it
/// did.
fn until_visible(
    load: &Loads,
    from: Instant,
    old: &[String],
    new: &[String],
) -> Result<(Vec<ConnectSample>, Instant)> {
    loop {
        interrupt::sleep(STEP)?;
        let samples = load.between(from, Instant::now());
        if let Some(visible) = visible(&samples, old, new) {
            return Ok((samples, visible));
        }
        if from.elapsed() > PATIENCE {
            bail!("the change to {} endpoints is not visible after {}", new.len(), duration(from.elapsed()));
        }
    }
}

/// When a change showed: after the last answer of who is gone, or else with the first answer of who is new.
fn visible(samples: &[ConnectSample], old: &[String], new: &[String]) -> Option<Instant> {
    let is_of = |sample: &ConnectSample, names: &[String]| names.iter().any(|it| sample.is_from(it));
    let gone: Vec<_> = old.iter().filter(|it| !new.contains(it)).cloned().collect();
    let come: Vec<_> = new.iter().filter(|it| !old.contains(it)).cloned().collect();
    let end = samples.iter().map(ConnectSample::ended).max()?;
    if gone.is_empty() {
        return samples.iter().filter(|it| is_of(it, &come)).map(ConnectSample::ended).min();
    }
    let last = samples.iter().filter(|it| is_of(it, &gone)).map(ConnectSample::ended).max();
    // Who is gone must have been silent for a while, to be called gone.
    last.or(samples.first().map(|it| it.began)).filter(|it| *it + STEP / 10 < end)
}

/// 3: the agent dies under load and comes back.
pub(crate) fn death_and_return(stage: &mut Stage) -> Result<()> {
    heading("3", "The agent is killed (SIGKILL), stays away, and comes back, under load");
    let mut probes = stage.probes()?;
    let load = Loads::start(stage)?;
    let mut rows = Vec::new();
    let names = stage.names_of_web_scaled(MOST);

    let running = Instant::now();
    interrupt::sleep(STEP / 2)?;
    let killed = Instant::now();
    stage.agent.take().context("the agent runs")?.kill9()?;
    interrupt::sleep(STEP / 2)?;
    // Nobody is there to see it.
    let (_, fewer) = stage.manifests.scale_web(2)?;
    interrupt::sleep(STEP / 2)?;
    let started = Instant::now();
    stage.start_agent()?;
    let (after, visible) = until_visible(&load, started, &names, &fewer)?;
    let end = Instant::now();
    stage.agent()?.wait_until(Duration::ZERO, || true)?;
    let (old, new): (Vec<_>, Vec<_>) = after.iter().partition(|it| it.began < visible);
    let (old, new) = (LoadReport::of(old), LoadReport::of(new));
    let (alive, dead) = (load.report(running, killed), load.report(killed, started));
    for report in [&alive, &dead, &old] {
        stage.tally.add(report, &names);
    }
    stage.tally.add(&new, &fewer);
    rows.push(Row::new("runs", &duration(killed - running), alive));
    rows.push(Row::new("is dead", &duration(started - killed), dead));
    rows.push(Row { by: new, ..Row::new("is back", &duration(end - started), LoadReport::of(&after)) });
    drop(load);
    table(&["The agent", "for", "Connects", "Failed", "Answered by"], &[1, 2, 3], &Row::cells(rows));

    let broken = probes.iter_mut().filter_map(|it| it.ping().err()).collect::<Vec<_>>();
    line(&format!("{} connections opened before: {} broken.", probes.len(), broken.len()));
    if let Some(error) = broken.first() {
        bail!("a connection broke while the agent was away: {error}");
    }
    line(&format!(
        "The manifest was scaled to {} endpoints while it was dead: in force {} after its start.",
        fewer.len(),
        duration(visible.saturating_duration_since(started)),
    ));
    Ok(())
}

/// 4: a Service without endpoints.
pub(crate) fn nothing_behind_it(stage: &mut Stage) -> Result<()> {
    heading("4", "A Service without endpoints refuses at once");
    let _client = stage.topology.client()?;
    let mut rows = Vec::new();
    for service in stage.manifests.services().filter(|it| it.endpoints.is_empty()) {
        for address in service.addresses() {
            let mut times = Vec::new();
            for _ in 0..REFUSALS {
                interrupt::check()?;
                let (error, took) =
                    connect_error(address).with_context(|| format!("{} has no endpoints", service.name))?;
                if error.kind() != std::io::ErrorKind::ConnectionRefused {
                    bail!("{address} must refuse with ECONNREFUSED, it failed with: {error}");
                }
                times.push(took);
            }
            times.sort_unstable();
            let (median, slowest) = (times[times.len() / 2], times[times.len() - 1]);
            rows.push(vec![
                service.name.clone(),
                show(service.transport, address),
                format!("ECONNREFUSED, {REFUSALS} of {REFUSALS}"),
                duration(median),
                duration(slowest),
            ]);
        }
    }
    table(&["Service", "Address", "Answer", "Median", "Slowest"], &[3, 4], &rows);
    Ok(())
}

/// ConnectLoad on every address of `web`.
struct Loads(Vec<ConnectLoad>);

impl Loads {
    fn start(stage: &Stage) -> Result<Self> {
        let _client = stage.topology.client()?;
        let addresses = stage.manifests.service("web")?.addresses();
        let load = |address| ConnectLoad::start(Transport::Tcp, address, THREADS, PAUSE);
        Ok(Self(addresses.into_iter().map(load).collect()))
    }

    fn between(&self, from: Instant, to: Instant) -> Vec<ConnectSample> {
        let samples = self.0.iter().flat_map(|it| it.since(0));
        samples.filter(|it| (from..to).contains(&it.began)).collect()
    }

    fn report(&self, from: Instant, to: Instant) -> LoadReport {
        LoadReport::of(&self.between(from, to))
    }

    fn stop(self) -> Vec<ConnectSample> {
        self.0.into_iter().flat_map(ConnectLoad::stop).collect()
    }
}

impl Stage {
    fn names_of_web(&self) -> Result<Vec<String>> {
        let mut names: Vec<_> =
            self.manifests.service("web")?.endpoints.iter().map(|it| it.0.clone()).collect();
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    fn names_of_web_scaled(&self, endpoints: u8) -> Vec<String> {
        (1..=endpoints).map(|it| format!("web-{it}")).collect()
    }

    /// Connections that last, to every address of `web`.
    fn probes(&self) -> Result<Vec<EchoConnection>> {
        let _client = self.topology.client()?;
        let addresses = self.manifests.service("web")?.addresses();
        let probes = addresses
            .iter()
            .cycle()
            .take(8)
            .map(|&it| EchoConnection::connect(it).with_context(|| format!("cannot connect to {it}")));
        probes.collect()
    }
}

/// A row of a table about load.
struct Row {
    label: String,
    value: String,
    report: LoadReport,
    /// Whose answers are shown, if not all.
    by: LoadReport,
}

impl Row {
    fn new(label: &str, value: &str, report: LoadReport) -> Self {
        Self { label: label.to_owned(), value: value.to_owned(), by: report.clone(), report }
    }

    fn cells(rows: Vec<Self>) -> Vec<Vec<String>> {
        let cells = |Self { label, value, report, by }: Self| {
            let answered = by.connects - by.failed;
            let by: Vec<_> =
                by.by.iter().map(|(name, &count)| format!("{name} {}", share(count, answered))).collect();
            vec![label, value, number(report.connects), number(report.failed), by.join(", ")]
        };
        rows.into_iter().map(cells).collect()
    }
}

fn show(transport: Transport, address: SocketAddr) -> String {
    format!("{address} {}", if transport == Transport::Tcp { "TCP" } else { "UDP" })
}
