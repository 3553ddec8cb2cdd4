//! One soak: a phase of churn, a phase of faults, and a steady phase, with checks throughout and at the end.
//! Invariant: the seed decides what happens; each observation is checked against every state that may have been active.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use build_tools::command::{status, workspace};
use fastrand::Rng;
use tests::{
    Build, EchoServer, ObjectTracker, TestNode, eventually, manifest,
    test_node::{NODE, expected_dump},
};

use crate::{
    hostile::Hostile,
    load::{LoadState, SoakLoad},
    proxy::{PROXY_TIMEOUT, Proxy, ProxyKind, open_files},
    random_cluster::{self, MAX_OTHERS, RandomCluster},
};

/// The share of the time, at the start, in which every Service changes without a pause while each decision of the
/// programs is delayed: entries that are written while a program still reads them show there.
const CHURN_SHARE: f64 = 0.2;
/// The share of the time after which faults end: from then on one process runs, so that its memory can be compared.
const FAULT_SHARE: f64 = 0.6;
/// How many changes lie between two times that the maps have their maximum size.
const CHANGES_PER_CYCLE: usize = 10;
/// How much the agent's memory may grow in the steady phase, in addition to 10 %.
const MAX_GROWTH_KB: u64 = 4096;
const KEPT_MANIFESTS: u64 = 60;

/// Runs a soak. The binaries for tests must have been built.
pub(crate) fn soak(node: TestNode, duration: Duration, seed: Option<u64>, is_hostile: bool) -> Result<()> {
    let seed = seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
    status("Soaking", &format!("for {} s, --seed {seed}", duration.as_secs()));
    let mut soak = Soak::new(node, seed)?;
    soak.hostile = is_hostile.then(|| Hostile::new(&soak.node));
    let mut result = soak.perform(duration);
    if result.is_ok() && soak.failures() > 0 {
        result = Err(anyhow!("{} checks failed", soak.failures()));
    }
    soak.print();
    let folder = soak.keep_evidence(result.is_ok());
    let mut objects = soak.objects.clone();
    drop(soak);
    if result.is_ok() && !eventually(PROXY_TIMEOUT, || objects.leaked().is_empty()) {
        bail!("the kernel still has {:?} at the end (seed {seed})", objects.leaked());
    }
    result.with_context(|| format!("seed {seed}; logs and manifests are in {}", folder.display()))
}

/// The state of a soak; fields are dropped in this order.
struct Soak {
    rng: Rng,
    cluster: RandomCluster,
    /// The number of the newest state.
    newest: u64,
    proxy: Option<Proxy>,
    hostile: Option<Hostile>,
    load: Option<SoakLoad>,
    _servers: Vec<EchoServer>,
    shared: Arc<LoadState>,
    node: TestNode,
    objects: ObjectTracker,
    folder: PathBuf,
    seed: u64,
    begin: Instant,
    events: Vec<String>,
    faults: BTreeMap<&'static str, u64>,
    leaks: Vec<String>,
    /// In kB: the maximum of the first half of the steady phase, and at the end.
    memory: Option<(u64, u64)>,
}

impl Soak {
    fn new(node: TestNode, seed: u64) -> Result<Self> {
        let mut servers = Vec::new();
        for address in (1..=random_cluster::ENDPOINTS).flat_map(manifest::endpoint) {
            if address.is_ipv6() {
                node.netns().add_address(address)?;
            }
            servers.push(EchoServer::start(&address.to_string(), SocketAddr::new(address, 8080))?);
        }
        node.write_file("node.yaml", &manifest::node_with_addresses(NODE, &random_cluster::node()));
        let folder = workspace().join("target/soak").join(seed.to_string());
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self {
            rng: Rng::with_seed(seed),
            cluster: RandomCluster::new(),
            newest: 0,
            proxy: None,
            hostile: None,
            load: None,
            _servers: servers,
            shared: Arc::default(),
            objects: ObjectTracker::new(node.sandbox()),
            node,
            folder,
            seed,
            begin: Instant::now(),
            events: Vec::new(),
            faults: BTreeMap::new(),
            leaks: Vec::new(),
            memory: None,
        })
    }

    fn perform(&mut self, duration: Duration) -> Result<()> {
        let product = ProxyKind { build: Build::Product, is_split: false };
        self.write("every Service")?;
        self.start(product)?;
        // Both sides of the maps have been written.
        for _ in 0..2 {
            self.change()?;
        }
        if self.hostile.is_some() {
            self.grow_and_shrink()?;
        }
        if let Some(hostile) = &mut self.hostile {
            hostile.start(&self.node)?;
        }
        let objects = self.objects.settled_counts();
        let pins = self.node.pins();
        self.load = Some(SoakLoad::start(&self.shared, self.seed)?);
        self.begin = Instant::now();

        let delayed = ProxyKind { build: Build::Failpoints, ..product };
        self.replace("replaced by a build with delays", delayed, true)?;
        let (churn, faults) = (duration.mul_f64(CHURN_SHARE), duration.mul_f64(FAULT_SHARE));
        status("Changing", "every Service without a pause");
        while self.begin.elapsed() < churn {
            let change = self.cluster.turn_over();
            self.write_and_wait(&change)?;
        }
        status("Changing", "Services at random, with faults");
        while self.begin.elapsed() < faults {
            if self.rng.u8(..10) < 7 { self.change()? } else { self.fault()? }
        }
        self.replace("replaced for the steady phase", product, true)?;
        status("Changing", "Services at random in one process");
        self.steady_phase(duration)?;

        self.load = None;
        if let Some(hostile) = &mut self.hostile {
            self.leaks.extend(hostile.finish());
        }
        let expected = expected_dump(&self.cluster.services(self.newest));
        let mut found = Vec::new();
        if !eventually(PROXY_TIMEOUT, || {
            found = self.node.dump(Build::Product).unwrap_or_default();
            found == expected
        }) {
            let missing = expected.iter().filter(|it| !found.contains(it)).count();
            let extra = found.iter().filter(|it| !expected.contains(it)).count();
            self.leaks.push(format!("active entries: {missing} are missing, {extra} are left over"));
        }
        if !eventually(PROXY_TIMEOUT, || self.node.pins() == pins) {
            self.leaks.push(format!("pins: {:?}, at the start {pins:?}", self.node.pins()));
        }
        let has_same = |it: &mut ObjectTracker| it.counts() == objects && it.leaked().is_empty();
        if !eventually(PROXY_TIMEOUT, || has_same(&mut self.objects)) {
            let (now, leaked) = (self.objects.counts(), self.objects.leaked());
            self.leaks.push(format!("kernel objects: {now:?}, at the start {objects:?}; leaked: {leaked:?}"));
        }
        self.proxy.take().context("a proxy runs")?.terminate()
    }

    /// Changes and growth in one process: its maximum memory in the first half bounds its memory at the end.
    fn steady_phase(&mut self, duration: Duration) -> Result<()> {
        let half = (self.begin.elapsed() + duration) / 2;
        self.cycle()?;
        let pid = self.proxy()?.agent.pid();
        let is_hostile = self.hostile.is_some();
        // How many connections of attackers are open changes all the time; others than sockets must not.
        let open_files = |pid| {
            let files = open_files(pid)?.into_iter();
            Ok::<BTreeMap<_, _>, anyhow::Error>(
                files.filter(|(it, _)| !(is_hostile && it == "socket")).collect(),
            )
        };
        let files = open_files(pid)?;
        let mut warm = self.memory_kb()?;
        while self.begin.elapsed() < half {
            self.cycle()?;
            warm = warm.max(self.memory_kb()?);
        }
        let mut last = warm;
        while self.begin.elapsed() < duration {
            self.cycle()?;
            last = self.memory_kb()?;
        }
        let files_now = open_files(pid)?;
        if files_now != files {
            self.leaks.push(format!("open files of the agent: {files_now:?}, before {files:?}"));
        }
        let limit = warm + warm / 10 + MAX_GROWTH_KB;
        if last > limit {
            self.leaks.push(format!("memory of the agent: {last} kB, before {warm} kB, limit {limit} kB"));
        }
        self.memory = Some((warm, last));
        Ok(())
    }

    fn memory_kb(&mut self) -> Result<u64> {
        let memory = self.proxy()?.agent.memory_kb("RssAnon")?;
        self.log(&format!("memory of the agent: {memory} kB"));
        Ok(memory)
    }

    /// Some changes, the maximum number of Services, and back.
    fn cycle(&mut self) -> Result<()> {
        for _ in 0..CHANGES_PER_CYCLE {
            self.change()?;
        }
        self.grow_and_shrink()
    }

    fn grow_and_shrink(&mut self) -> Result<()> {
        for others in [MAX_OTHERS, 0] {
            let change = self.cluster.resize(others);
            self.write_and_wait(&change)?;
        }
        Ok(())
    }

    /// Makes one change, or several in quick succession, and waits until the newest state is active.
    fn change(&mut self) -> Result<()> {
        let times = if self.rng.u8(..4) == 0 { self.rng.usize(2..6) } else { 1 };
        for _ in 0..times {
            self.change_once()?;
            if times > 1 {
                thread::sleep(Duration::from_micros(self.rng.u64(..5000)));
            }
        }
        self.wait_for_newest()
    }

    fn change_once(&mut self) -> Result<()> {
        let change = self.cluster.change(&mut self.rng);
        self.write(&change)
    }

    fn fault(&mut self) -> Result<()> {
        let kind = self.proxy()?.kind;
        match self.rng.u8(..8) {
            0 | 1 => {
                // Likely while the change is applied.
                self.change_once()?;
                thread::sleep(Duration::from_micros(self.rng.u64(..40_000)));
                self.replace("killed during a change", kind, false)
            }
            2 => {
                self.kill("stopped for a while")?;
                for _ in 0..self.rng.usize(1..4) {
                    self.change_once()?;
                    thread::sleep(Duration::from_millis(self.rng.u64(..100)));
                }
                self.start(kind)
            }
            3 => self.replace("terminated and restarted", kind, true),
            4 => {
                self.kill("killed during its start")?;
                for _ in 0..self.rng.usize(1..4) {
                    let proxy = Proxy::start(&self.node, kind)?;
                    thread::sleep(Duration::from_micros(self.rng.u64(..150_000)));
                    proxy.kill()?;
                }
                self.start(kind)
            }
            5 if kind.is_split => {
                self.event("brain killed");
                self.proxy.as_mut().context("a proxy runs")?.replace_brain(&self.node)?;
                self.change()
            }
            5 => self.replace("split into brain and agent", ProxyKind { is_split: true, ..kind }, false),
            _ => {
                // The builds with delays are more likely to expose a race.
                let (build, event) = match self.rng.u8(..5) {
                    0 => (Build::Product, "replaced by the product"),
                    1 | 2 => (Build::Failpoints, "replaced by a build with delays"),
                    _ => (Build::NextLayout, "replaced by a build with another layout"),
                };
                let kind = ProxyKind { build, is_split: self.rng.bool() };
                let is_graceful = self.rng.bool();
                self.replace(event, kind, is_graceful)
            }
        }
    }

    fn replace(&mut self, event: &'static str, kind: ProxyKind, is_graceful: bool) -> Result<()> {
        if is_graceful {
            self.event(event);
            self.proxy.take().context("a proxy runs")?.terminate()?;
        } else {
            self.kill(event)?;
        }
        self.start(kind)
    }

    fn kill(&mut self, event: &'static str) -> Result<()> {
        self.event(event);
        self.proxy.take().context("a proxy runs")?.kill()
    }

    /// Starts a proxy and waits until it has attached its programs and the newest state is active.
    fn start(&mut self, kind: ProxyKind) -> Result<()> {
        let mut proxy = Proxy::start(&self.node, kind)?;
        if let Some(hostile) = &self.hostile {
            hostile.adopt(proxy.agent.pid())?;
        }
        proxy.agent.wait_until_applied(PROXY_TIMEOUT)?;
        self.objects.observe();
        self.proxy = Some(proxy);
        self.wait_for_newest()
    }

    fn proxy(&self) -> Result<&Proxy> {
        self.proxy.as_ref().context("a proxy runs")
    }

    fn wait_for_newest(&mut self) -> Result<()> {
        let newest = self.newest;
        let agent = &mut self.proxy.as_mut().context("a proxy runs")?.agent;
        let is_active = || active_state(newest) == Some(newest);
        let became_active = agent.wait_until(PROXY_TIMEOUT, is_active);
        became_active.with_context(|| format!("state {newest} never became active"))?;
        self.shared.history.lock().active(newest, Instant::now());
        self.hostile.iter_mut().for_each(Hostile::observe);
        Ok(())
    }

    fn write_and_wait(&mut self, change: &str) -> Result<()> {
        self.write(change)?;
        self.wait_for_newest()
    }

    fn write(&mut self, change: &str) -> Result<()> {
        self.newest += 1;
        let services = self.cluster.services(self.newest);
        self.log(&format!("state {}: {change}", self.newest));
        self.shared.history.lock().write(self.newest, &services, Instant::now());
        self.node.write(&services);
        let manifest = |number| self.folder.join(format!("{number}.yaml"));
        fs::copy(self.node.manifests().join("all.yaml"), manifest(self.newest))?;
        if let Some(old) = self.newest.checked_sub(KEPT_MANIFESTS) {
            // State 0 has none.
            let _ = fs::remove_file(manifest(old));
        }
        Ok(())
    }

    fn event(&mut self, event: &'static str) {
        *self.faults.entry(event).or_default() += 1;
        self.log(event);
    }

    fn log(&mut self, text: &str) {
        self.events.push(format!("{:9.3} {text}", self.begin.elapsed().as_secs_f64()));
    }

    fn failures(&self) -> u64 {
        // No endpoint answers attackers: theirs are ejected for them.
        let false_ejections = if self.hostile.is_some() { 0 } else { self.ejections() };
        self.shared.failures() + self.leaks.len() as u64 + false_ejections
    }

    fn ejections(&self) -> u64 {
        let [_, timeouts, refusals, _] = self.node.health_words();
        timeouts + refusals
    }

    fn print(&self) {
        println!();
        let row = |name: &str, count: u64| println!(" {name:<58}  {count:>9}");
        row("states", self.newest);
        for (event, count) in &self.faults {
            row(event, *count);
        }
        for (name, count) in self.shared.rows() {
            row(name, count);
        }
        for (name, count) in self.hostile.iter().flat_map(Hostile::rows) {
            row(name, count);
        }
        match self.hostile {
            Some(_) => row("endpoints ejected for attackers", self.ejections()),
            None => row("FALSELY EJECTED ENDPOINTS (all of them answer)", self.ejections()),
        }
        row("LEAKED (entries, pins, kernel objects, open files, memory)", self.leaks.len() as u64);
        if let Some((warm, last)) = self.memory {
            println!(
                "\nmemory of the agent in the steady phase: {warm} kB at most at first, {last} kB at the end"
            );
        }
        for failure in self.shared.failure_texts().iter().chain(&self.leaks) {
            println!("failed: {failure}");
        }
    }

    /// Keeps logs and manifests of a soak that failed; returns their folder.
    fn keep_evidence(&self, has_passed: bool) -> PathBuf {
        if has_passed {
            let _ = fs::remove_dir_all(&self.folder);
        } else {
            // An error here must not hide the failure itself.
            let _ = fs::write(self.folder.join("events.log"), self.events.join("\n"));
            let _ = fs::write(self.folder.join("failures.log"), self.shared.failure_texts().join("\n"));
            for file in fs::read_dir(self.node.sandbox().files()).into_iter().flatten().flatten() {
                if file.path().extension().is_some_and(|it| it == "log") {
                    let _ = fs::copy(file.path(), self.folder.join(file.file_name()));
                }
            }
        }
        self.folder.clone()
    }
}

/// The state whose marker Service is active, if it is one of the last ones up to `newest`.
fn active_state(newest: u64) -> Option<u64> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect(random_cluster::marker()).ok()?;
    // The endpoint is an address of this host: the socket, connected to it, takes it as its own.
    let address: IpAddr = socket.local_addr().ok()?.ip();
    random_cluster::state_of_marker(address, newest)
}

#[cfg(test)]
mod tests_of_soak {
    use super::*;

    #[test]
    fn a_soak_of_20_seconds_finds_nothing_wrong() {
        let Some(node) = TestNode::or_skip() else { return };
        soak(node, Duration::from_secs(20), None, false).expect("no check fails");
    }
}
