//! The phases of the demo, one function each.

use std::{
    io::ErrorKind,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use tests::{
    ConnectLoad, Transport, connect_error,
    load::{ConnectSample, LoadReport},
    request,
};

use crate::{
    demo::{Demo, TIMEOUT},
    interrupt,
    manifests::MAX_ENDPOINTS,
    screen::{duration, heading, line, number, share, table},
};

/// How many requests each address gets in the first phase.
const REQUESTS: usize = 1_000;
/// How long each step under load takes.
const STEP: Duration = Duration::from_millis(1_500);
/// How many threads connect to each address, and how long each sleeps between two connects.
const THREADS: usize = 2;
const CONNECT_INTERVAL: Duration = Duration::from_micros(200);
/// How many connects a Service without endpoints gets.
const REFUSALS: usize = 200;

/// Compares which endpoints answer at each address with the manifests.
pub(crate) fn every_service_answers(demo: &mut Demo) -> Result<()> {
    heading("1", "Every Service answers at every address, by every endpoint of its manifest");
    let mut rows = Vec::new();
    let mut all = Vec::new();
    let client = demo.cluster.client.enter()?;
    for service in demo.manifests.services().filter(|it| !it.endpoints.is_empty()) {
        for address in service.addresses() {
            let samples = samples(service.transport, address)?;
            let report = LoadReport::of(&samples);
            let expected = service.endpoints_of(address);
            let names: Vec<_> = expected.iter().map(|(name, _)| name.clone()).collect();
            let mut first = (service.name.clone(), at(service.transport, address));
            for (name, pod) in expected {
                let count = report.by_server.get(name).copied().unwrap_or_default();
                if count == 0 {
                    let LoadReport { by_server, errors, .. } = report;
                    bail!("{name} at {pod} never answered for {address}: {by_server:?} {errors:?}");
                }
                let (service, at) = std::mem::take(&mut first);
                let share = share(count, report.connects);
                rows.push(vec![service, at, name.clone(), pod.to_string(), number(count), share]);
            }
            demo.totals.add(&report, &names);
            all.extend(samples);
        }
    }
    drop(client);
    table(&["Service", "Address", "Endpoint in the manifest", "at", "Answered", "Share"], &[4, 5], &rows);
    let report = LoadReport::of(&all);
    line(&format!(
        "{} connects, {} failed; a request and its reply took {} (median), {} (99 %).",
        number(report.connects),
        number(report.failed),
        duration(report.p50),
        duration(report.p99),
    ));
    line("Half of the UDP requests used sendto(2): their replies have the Service's address, too.");
    Ok(())
}

fn samples(transport: Transport, address: SocketAddr) -> Result<Vec<ConnectSample>> {
    let sample = |n: usize| {
        interrupt::check()?;
        let transport = match transport {
            Transport::Udp if n % 2 == 1 => Transport::UdpUnconnected,
            other => other,
        };
        let started = Instant::now();
        let result = request(transport, address).map_err(|it| it.to_string());
        Ok(ConnectSample { started, duration: started.elapsed(), result })
    };
    (0..REQUESTS).map(sample).collect()
}

pub(crate) fn scaling_under_load(demo: &mut Demo) -> Result<()> {
    let mut names = demo.web_endpoints()?;
    heading(
        "2",
        &format!(
            "web scales {} → 1 → {MAX_ENDPOINTS} by an edit of its manifest, under load ({} threads)",
            names.len(),
            THREADS * 2
        ),
    );
    let load = WebLoad::start(demo)?;
    let mut rows = Vec::new();

    let began = Instant::now();
    interrupt::sleep(STEP / 2)?;
    let report = load.report(began, Instant::now());
    demo.totals.add(&report, &names);
    rows.push(load_row(&format!("{} endpoints", names.len()), "", &report, &report));

    for count in [1, MAX_ENDPOINTS] {
        let (edited, new) = demo.manifests.scale_web(count)?;
        let (samples, visible) = wait_until_visible(&load, edited, &names, &new)?;
        let visible = visible.saturating_duration_since(edited);
        let change = format!("{} → {count}", names.len());

        // Until the change is visible the old endpoints may answer, too; afterwards only the new ones.
        let (before, after): (Vec<_>, Vec<_>) = samples.iter().partition(|it| it.started < edited + visible);
        let both: Vec<_> = names.iter().chain(&new).cloned().collect();
        demo.totals.add(&LoadReport::of(before), &both);
        let after = LoadReport::of(after);
        demo.totals.add(&after, &new);
        rows.push(load_row(&change, &duration(visible), &LoadReport::of(&samples), &after));
        names = new;
    }
    let report = LoadReport::of(&load.stop());
    table(&["Change", "Visible after", "Connects", "Failed", "Answered from then on by"], &[1, 2, 3], &rows);
    line(
        "Visible: from the rename of the file until the last reply of a removed endpoint, or the first of a new one.",
    );
    line(&format!("A connect took {} (median), {} (99 %).", duration(report.p50), duration(report.p99)));
    Ok(())
}

/// Waits at least one step, until a change is visible; returns the samples since `from`, and when it became visible.
fn wait_until_visible(
    load: &WebLoad,
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
        if from.elapsed() > TIMEOUT {
            bail!("the change to {} endpoints is not visible after {}", new.len(), duration(from.elapsed()));
        }
    }
}

/// When a change became visible: after the last reply of a removed endpoint, or with the first of an added one.
fn visible(samples: &[ConnectSample], old: &[String], new: &[String]) -> Option<Instant> {
    let is_from = |sample: &ConnectSample, names: &[String]| names.iter().any(|it| sample.is_from(it));
    let removed: Vec<_> = old.iter().filter(|it| !new.contains(it)).cloned().collect();
    let added: Vec<_> = new.iter().filter(|it| !old.contains(it)).cloned().collect();
    let end = samples.iter().map(ConnectSample::ended).max()?;
    if removed.is_empty() {
        return samples.iter().filter(|it| is_from(it, &added)).map(ConnectSample::ended).min();
    }
    let last = samples.iter().filter(|it| is_from(it, &removed)).map(ConnectSample::ended).max();
    // A removed endpoint must have been silent for a while.
    last.or(samples.first().map(|it| it.started)).filter(|it| *it + STEP / 10 < end)
}

pub(crate) fn crash_and_restart(demo: &mut Demo) -> Result<()> {
    heading("3", "The agent is killed (SIGKILL), stays away, and comes back, under load");
    let mut connections = demo.connections()?;
    let load = WebLoad::start(demo)?;
    let names: Vec<_> = (1..=MAX_ENDPOINTS).map(|it| format!("web-{it}")).collect();

    let running = Instant::now();
    interrupt::sleep(STEP / 2)?;
    let killed = Instant::now();
    demo.agent.take().context("the agent runs")?.kill9()?;
    interrupt::sleep(STEP / 2)?;
    // No agent sees this change.
    let (_, fewer) = demo.manifests.scale_web(2)?;
    interrupt::sleep(STEP / 2)?;
    let started = Instant::now();
    demo.start_agent()?;
    let (after, visible) = wait_until_visible(&load, started, &names, &fewer)?;
    let end = Instant::now();
    demo.agent()?.wait_until(Duration::ZERO, || true)?;
    let (old, new): (Vec<_>, Vec<_>) = after.iter().partition(|it| it.started < visible);
    let (old, new) = (LoadReport::of(old), LoadReport::of(new));
    let (alive, dead) = (load.report(running, killed), load.report(killed, started));
    for report in [&alive, &dead, &old] {
        demo.totals.add(report, &names);
    }
    demo.totals.add(&new, &fewer);
    let rows = [
        load_row("runs", &duration(killed - running), &alive, &alive),
        load_row("is dead", &duration(started - killed), &dead, &dead),
        load_row("is back", &duration(end - started), &LoadReport::of(&after), &new),
    ];
    drop(load);
    table(&["The agent", "for", "Connects", "Failed", "Answered by"], &[1, 2, 3], &rows);

    let broken: Vec<_> = connections.iter_mut().filter_map(|it| it.ping().err()).collect();
    line(&format!("{} connections opened before: {} broken.", connections.len(), broken.len()));
    if let Some(error) = broken.first() {
        bail!("a connection broke while the agent was away: {error}");
    }
    line(&format!(
        "The manifest was scaled to {} endpoints while it was dead: active {} after its start.",
        fewer.len(),
        duration(visible.saturating_duration_since(started)),
    ));
    Ok(())
}

pub(crate) fn no_endpoints(demo: &mut Demo) -> Result<()> {
    heading("4", "A Service without endpoints refuses at once");
    let _client = demo.cluster.client.enter()?;
    let mut rows = Vec::new();
    for service in demo.manifests.services().filter(|it| it.endpoints.is_empty()) {
        for address in service.addresses() {
            let mut times = Vec::new();
            for _ in 0..REFUSALS {
                interrupt::check()?;
                let (error, took) =
                    connect_error(address).with_context(|| format!("{} has no endpoints", service.name))?;
                if error.kind() != ErrorKind::ConnectionRefused {
                    bail!("a connect to {address} must fail with ECONNREFUSED; it failed with: {error}");
                }
                times.push(took);
            }
            times.sort_unstable();
            let (median, slowest) = (times[times.len() / 2], times[times.len() - 1]);
            rows.push(vec![
                service.name.clone(),
                at(service.transport, address),
                format!("ECONNREFUSED, {REFUSALS} of {REFUSALS}"),
                duration(median),
                duration(slowest),
            ]);
        }
    }
    table(&["Service", "Address", "Answer", "Median", "Slowest"], &[3, 4], &rows);
    Ok(())
}

/// Serves the page, with something to see, until Ctrl-C.
pub(crate) fn until_interrupted(demo: &mut Demo, page: SocketAddr) -> Result<()> {
    heading("5", "The page");
    line(&format!("Open http://{page}/ in a browser of this machine; Ctrl-C ends the demo."));
    line(&format!(
        "From another machine: ssh -L {0}:{page} HOST, and open http://127.0.0.1:{0}/ there.",
        page.port()
    ));
    let _inside = demo.sandbox.enter()?;
    let _client = demo.cluster.client.enter()?;
    let targets: Vec<_> = demo.manifests.services().map(|it| (it.transport, it.addresses())).collect();
    for (turn, endpoints) in (0_u32..).zip([3, 4, 2, 3, 1, 4].into_iter().cycle()) {
        let scaled = demo.manifests.scale_web(endpoints);
        // Each Service has a rate of its own, which changes.
        let loads = targets.iter().zip(1_u32..).flat_map(|((transport, addresses), number)| {
            let pause = Duration::from_millis(u64::from(8 + 9 * number * (1 + (turn * number) % 4)));
            addresses.iter().map(move |it| ConnectLoad::start(*transport, *it, 1, pause))
        });
        let loads: Vec<_> = loads.collect();
        let is_interrupted = interrupt::sleep(STEP * 4).is_err();
        drop(loads);
        if is_interrupted {
            break;
        }
        scaled?;
    }
    println!();
    Ok(())
}

struct WebLoad(Vec<ConnectLoad>);

impl WebLoad {
    fn start(demo: &Demo) -> Result<Self> {
        let _client = demo.cluster.client.enter()?;
        let addresses = demo.manifests.web()?.addresses();
        let load = |address| ConnectLoad::start(Transport::Tcp, address, THREADS, CONNECT_INTERVAL);
        Ok(Self(addresses.into_iter().map(load).collect()))
    }

    fn between(&self, from: Instant, to: Instant) -> Vec<ConnectSample> {
        let samples = self.0.iter().flat_map(|it| it.since(0));
        samples.filter(|it| (from..to).contains(&it.started)).collect()
    }

    fn report(&self, from: Instant, to: Instant) -> LoadReport {
        LoadReport::of(&self.between(from, to))
    }

    fn stop(self) -> Vec<ConnectSample> {
        self.0.into_iter().flat_map(ConnectLoad::stop).collect()
    }
}

/// A row of a table about load; the shares of the endpoints are those in `by`.
fn load_row(label: &str, value: &str, report: &LoadReport, by: &LoadReport) -> Vec<String> {
    let answered = by.connects - by.failed;
    let by = by.by_server.iter().map(|(name, &count)| format!("{name} {}", share(count, answered)));
    let by = by.collect::<Vec<_>>().join(", ");
    vec![label.to_owned(), value.to_owned(), number(report.connects), number(report.failed), by]
}

fn at(transport: Transport, address: SocketAddr) -> String {
    format!("{address} {}", if transport == Transport::Tcp { "TCP" } else { "UDP" })
}
