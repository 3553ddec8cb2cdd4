//! `cargo xtask soak`: everything that can happen to a node, at random, under load that never pauses.
//! The one rule: what happens follows from the seed; what is seen is held against every state that may have been.

mod cluster;
mod history;
mod load;
mod proxy;

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use fastrand::Rng;
use tests::{
    Build, EchoServer, Sandbox, TestNode, eventually, manifest,
    test_node::{expected_dump, kernel_objects, settled_kernel_objects},
};

use crate::{
    cluster::Cluster,
    load::{Counts, Load, Shared},
    proxy::{Kind, LIMIT, Proxy, files_at_rest, memory},
};
use build_tools::{
    build::build_for_tests,
    command::{status, workspace},
    programs::test_programs,
    progress::ProgressLine as Status,
};

/// The share of the time, at the beginning, in which a build that lingers inside each decision lives through changes of
/// everything without a pause: what is written too early to what a program still reads shows there.
const CHURN: f64 = 0.2;
/// The share of the time, that of the churn included, in which proxies die and are replaced; in the rest one lives, so that its memory can be told.
const STORM: f64 = 0.6;
/// How many changes lie between two times that the maps are at their largest.
const CYCLE: usize = 10;
/// How much more memory it may hold in the end, besides a tenth.
const GROWTH_KB: u64 = 4096;
/// How many of the last manifests are kept.
const KEPT: u64 = 60;

/// Change, kill, upgrade and grow a node at random, under load that never pauses (as root).
///
/// Builds what is missing first. Fails if one connect fails, one answer comes from an endpoint that did not serve, one
/// lasting socket breaks, or anything is left over.
#[derive(Parser)]
#[command(bin_name = "cargo xtask soak", max_term_width = 100)]
struct Arguments {
    /// How long.
    #[arg(long, value_name = "N", default_value_t = 3.0)]
    minutes: f64,
    /// What happens, and in which order; a run says its own.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    match start(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(Arguments { minutes, seed }: &Arguments) -> Result<()> {
    let duration = Duration::try_from_secs_f64(minutes * 60.0).context("--minutes")?;
    let _ = test_programs();
    build_for_tests()?;
    soak(TestNode::enter(Sandbox::new("soak")?)?, duration, *seed)
}

/// Soaks for this long. The builds for tests must be there.
fn soak(world: TestNode, duration: Duration, seed: Option<u64>) -> Result<()> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_micros() as u64);
    let seed = seed.unwrap_or(clock % 1_000_000);
    status("Soaking", &format!("for {} s, --seed {seed}", duration.as_secs()));
    let before = settled_kernel_objects();
    let mut soak = Soak::new(world, seed)?;
    let mut result = soak.perform(duration);
    soak.status.clear();
    if result.is_ok() && soak.wrong() > 0 {
        result = Err(anyhow::anyhow!("{} things went wrong", soak.wrong()));
    }
    soak.print();
    let kept = soak.keep(result.is_ok());
    drop(soak);
    if result.is_ok() && !eventually(LIMIT, || kernel_objects() == before) {
        bail!("the kernel holds {:?} in the end, and held {before:?} before (seed {seed})", kernel_objects());
    }
    result.with_context(|| format!("seed {seed}; logs and manifests are in {}", kept.display()))
}

/// What soaks, in the order in which it goes.
struct Soak {
    rng: Rng,
    cluster: Cluster,
    number: u64,
    proxy: Option<Proxy>,
    load: Option<Load>,
    _servers: Vec<EchoServer>,
    shared: Arc<Shared>,
    world: TestNode,
    folder: PathBuf,
    seed: u64,
    begin: Instant,
    events: Vec<String>,
    done: BTreeMap<&'static str, u64>,
    leaks: Vec<String>,
    /// In kB, when warm and in the end.
    memory: Option<(u64, u64)>,
    status: Status,
}

impl Soak {
    fn new(world: TestNode, seed: u64) -> Result<Self> {
        let mut servers = Vec::new();
        for address in (1..=cluster::ENDPOINTS).flat_map(cluster::endpoint) {
            if address.is_ipv6() {
                world.netns().add_address(address)?;
            }
            servers.push(EchoServer::start(&address.to_string(), SocketAddr::new(address, 8080))?);
        }
        manifest::write_atomically(&world.manifests().join("node.yaml"), &cluster::node_manifest())?;
        let folder = workspace().join("target/soak").join(seed.to_string());
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self {
            rng: Rng::with_seed(seed),
            cluster: Cluster::new(),
            number: 0,
            proxy: None,
            load: None,
            _servers: servers,
            shared: Arc::default(),
            world,
            folder,
            seed,
            begin: Instant::now(),
            events: Vec::new(),
            done: BTreeMap::new(),
            leaks: Vec::new(),
            memory: None,
            status: Status::new(),
        })
    }

    fn perform(&mut self, duration: Duration) -> Result<()> {
        let calm = Kind { build: Build::Product, is_two: false };
        self.write("everything is there")?;
        self.start(calm)?;
        // Each side has been written once.
        for _ in 0..2 {
            self.change()?;
        }
        let objects = settled_kernel_objects();
        let pins = self.world.pins();
        self.load = Some(Load::start(&self.shared, self.seed)?);
        self.begin = Instant::now();

        self.replace("replaced by a lingering build", Kind { build: Build::Failpoints, ..calm }, true)?;
        let (churn, storm) = (duration.mul_f64(CHURN), duration.mul_f64(STORM));
        while self.begin.elapsed() < churn {
            let what = self.cluster.turn_over();
            self.write(&what)?;
            self.wait_for_newest()?;
        }
        while self.begin.elapsed() < storm {
            if self.rng.u8(..10) < 7 { self.change()? } else { self.upheaval()? }
        }
        self.replace("the storm ends", calm, true)?;

        self.live_calmly(duration)?;

        self.load = None;
        let expected = expected_dump(&self.cluster.services(self.number));
        let mut found = Vec::new();
        if !eventually(LIMIT, || {
            found = self.world.dump(Build::Product).unwrap_or_default();
            found == expected
        }) {
            let missing = expected.iter().filter(|it| !found.contains(it)).count();
            let extra = found.iter().filter(|it| !expected.contains(it)).count();
            self.leaks.push(format!("entries in force: {missing} are missing, {extra} should not be there"));
        }
        if !eventually(LIMIT, || self.world.pins() == pins) {
            self.leaks.push(format!("pins: {:?}, at first {pins:?}", self.world.pins()));
        }
        if !eventually(LIMIT, || kernel_objects() == objects) {
            self.leaks.push(format!("kernel objects: {:?}, at first {objects:?}", kernel_objects()));
        }
        self.proxy.take().context("there is a proxy")?.terminate()
    }

    /// One process lives through changes and growth: what it holds at most in the first half of that time is what it
    /// needs when warm, and what it may hold in the end.
    fn live_calmly(&mut self, duration: Duration) -> Result<()> {
        let process = self.proxy.as_ref().context("there is a proxy")?.process();
        let half = (self.begin.elapsed() + duration) / 2;
        self.cycle()?;
        let files = files_at_rest(process)?;
        let mut warm = memory(process)?;
        while self.begin.elapsed() < half {
            self.cycle()?;
            warm = warm.max(self.memory_of(process)?);
        }
        let mut last = warm;
        while self.begin.elapsed() < duration {
            self.cycle()?;
            last = self.memory_of(process)?;
        }
        let files_now = files_at_rest(process)?;
        if files_now != files {
            self.leaks.push(format!("open files of the agent: {files_now:?}, warm {files:?}"));
        }
        let limit = warm + warm / 10 + GROWTH_KB;
        if last > limit {
            self.leaks.push(format!("memory of the agent: {last} kB, warm {warm} kB, limit {limit} kB"));
        }
        self.memory = Some((warm, last));
        Ok(())
    }

    fn memory_of(&mut self, process: u32) -> Result<u64> {
        let memory = memory(process)?;
        self.log(&format!("memory of the agent: {memory} kB"));
        Ok(memory)
    }

    /// Some changes, all maps at their largest, and back.
    fn cycle(&mut self) -> Result<()> {
        for _ in 0..CYCLE {
            self.change()?;
        }
        for what in [self.cluster.grow(), self.cluster.resize(0)] {
            self.write(&what)?;
            self.wait_for_newest()?;
        }
        Ok(())
    }

    /// Changes something once, or several times without waiting, and waits until it is in force.
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
        let what = self.cluster.change(&mut self.rng);
        self.write(&what)
    }

    /// Something happens to the proxy itself.
    fn upheaval(&mut self) -> Result<()> {
        let now = self.proxy.as_ref().context("there is a proxy")?.kind;
        match self.rng.u8(..8) {
            0 | 1 => {
                // In the middle of a change, perhaps.
                self.change_once()?;
                thread::sleep(Duration::from_micros(self.rng.u64(..40_000)));
                self.replace("killed in the middle of a change", now, false)
            }
            2 => {
                self.kill("away for a while")?;
                for _ in 0..self.rng.usize(1..4) {
                    self.change_once()?;
                    thread::sleep(Duration::from_millis(self.rng.u64(..100)));
                }
                self.start(now)
            }
            3 => self.replace("ended and started again", now, true),
            4 => {
                self.kill("killed while it starts")?;
                for _ in 0..self.rng.usize(1..4) {
                    let half = Proxy::start(&self.world, now)?;
                    thread::sleep(Duration::from_micros(self.rng.u64(..150_000)));
                    half.kill()?;
                }
                self.start(now)
            }
            5 if now.is_two => {
                self.event("the brain is killed");
                let world = &self.world;
                self.proxy.as_mut().context("there is a proxy")?.replace_brain(world)?;
                self.change()
            }
            5 => self.replace("in two processes", Kind { is_two: true, ..now }, false),
            _ => {
                // What lingers shows more.
                let builds = [
                    Build::Product,
                    Build::Failpoints,
                    Build::Failpoints,
                    Build::NextLayout,
                    Build::NextLayout,
                ];
                let build = builds[self.rng.usize(..builds.len())];
                let what = match build {
                    Build::NextLayout => "upgraded to another layout",
                    Build::Failpoints => "replaced by a lingering build",
                    Build::Product => "replaced by the product",
                };
                let kind = Kind { build, is_two: self.rng.bool() };
                let in_order = self.rng.bool();
                self.replace(what, kind, in_order)
            }
        }
    }

    fn replace(&mut self, what: &'static str, kind: Kind, in_order: bool) -> Result<()> {
        if in_order {
            self.event(what);
            self.proxy.take().context("there is a proxy")?.terminate()?;
        } else {
            self.kill(what)?;
        }
        self.start(kind)
    }

    fn kill(&mut self, what: &'static str) -> Result<()> {
        self.event(what);
        self.proxy.take().context("there is a proxy")?.kill()
    }

    /// Starts a proxy, and waits until it alone is in force, with the newest state.
    fn start(&mut self, kind: Kind) -> Result<()> {
        let mut proxy = Proxy::start(&self.world, kind)?;
        proxy.wait()?;
        self.proxy = Some(proxy);
        self.wait_for_newest()
    }

    fn wait_for_newest(&mut self) -> Result<()> {
        let (number, shared) = (self.number, Arc::clone(&self.shared));
        let proxy = self.proxy.as_mut().context("there is a proxy")?;
        let is_seen = || in_force(number).is_some_and(|seen| seen == number);
        proxy.wait_until(is_seen).with_context(|| format!("state {number} never came into force"))?;
        shared.history().seen(number);
        self.show();
        Ok(())
    }

    fn write(&mut self, what: &str) -> Result<()> {
        self.number += 1;
        let services = self.cluster.services(self.number);
        self.log(&format!("state {}: {what}", self.number));
        self.shared.history().write(self.number, &services);
        self.world.write(&services);
        let manifest = |number| self.folder.join(format!("{number}.yaml"));
        fs::copy(self.world.manifests().join("all.yaml"), manifest(self.number))?;
        if let Some(old) = self.number.checked_sub(KEPT) {
            // There is none at first.
            let _ = fs::remove_file(manifest(old));
        }
        Ok(())
    }

    fn event(&mut self, what: &'static str) {
        *self.done.entry(what).or_default() += 1;
        self.log(what);
    }

    fn log(&mut self, what: &str) {
        self.events.push(format!("{:9.3} {what}", self.begin.elapsed().as_secs_f64()));
    }

    fn wrong(&self) -> u64 {
        self.shared.wrong() + self.leaks.len() as u64
    }

    fn show(&mut self) {
        let Counts { tcp, udp, unconnected, lasting, .. } = &self.shared.counts;
        let [tcp, udp, unconnected, lasting] =
            [tcp, udp, unconnected, lasting].map(|it| it.load(Ordering::Relaxed));
        let upheavals: u64 = self.done.values().sum();
        self.status.show(&format!(
            "     Soaking {:.0} s: {} states, {upheavals} upheavals; {tcp} TCP, {} UDP, {lasting} lasting; {} wrong",
            self.begin.elapsed().as_secs_f64(),
            self.number,
            udp + unconnected,
            self.shared.wrong(),
        ));
    }

    fn print(&self) {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let Counts { tcp, udp, unconnected, returning, lasting, refused, ended, failed, misrouted, broken } =
            &self.shared.counts;
        let mut row =
            |name: &str, count: u64| table.add_row([name.to_owned(), count.to_string()]).to_string();
        row("states", self.number);
        for (what, count) in &self.done {
            row(what, *count);
        }
        for (name, count) in [
            ("TCP connects", tcp),
            ("questions over fresh connected UDP sockets", udp),
            ("questions over fresh unconnected UDP sockets", unconnected),
            ("questions of clients that come again", returning),
            ("questions over sockets that last", lasting),
            ("of all these, refused as they should be", refused),
            ("connected UDP sockets ended as they should be", ended),
            ("FAILED", failed),
            ("MISROUTED", misrouted),
            ("LASTING SOCKETS BROKEN", broken),
        ] {
            row(name, count.load(Ordering::Relaxed));
        }
        row("LEAKED (entries, pins, kernel objects, open files, memory)", self.leaks.len() as u64);
        if let Some(column) = table.column_mut(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!();
        for line in table.lines() {
            println!("{}", line.trim_end());
        }
        if let Some((warm, last)) = self.memory {
            println!(
                "\nmemory of the agent that lived through the calm: {warm} kB when warm, {last} kB in the end"
            );
        }
        for mistake in self.shared.mistakes().iter().chain(&self.leaks) {
            println!("wrong: {mistake}");
        }
    }

    /// Keeps what a search for a mistake needs, if there was one; gives back where.
    fn keep(&self, is_fine: bool) -> PathBuf {
        if is_fine {
            let _ = fs::remove_dir_all(&self.folder);
        } else {
            // What cannot be kept is not worth another failure.
            let _ = fs::write(self.folder.join("events.log"), self.events.join("\n"));
            let _ = fs::write(self.folder.join("mistakes.log"), self.shared.mistakes().join("\n"));
            for file in fs::read_dir(self.world.sandbox().files()).into_iter().flatten().flatten() {
                if file.path().extension().is_some_and(|it| it == "log") {
                    let _ = fs::copy(file.path(), self.folder.join(file.file_name()));
                }
            }
        }
        self.folder.clone()
    }
}

/// The state that the beacon leads to, if it is one of the last up to `newest`.
fn in_force(newest: u64) -> Option<u64> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect(cluster::beacon()).ok()?;
    // Connected to an address of this host, a socket bears it.
    let address: IpAddr = socket.local_addr().ok()?.ip();
    cluster::beacon_of(address, newest)
}

#[cfg(test)]
mod tests_of_soak {
    use super::*;

    #[test]
    fn a_soak_of_20_seconds_finds_nothing_wrong() {
        let Some(world) = TestNode::or_skip("soak") else { return };
        soak(world, Duration::from_secs(20), None).expect("nothing goes wrong");
    }
}
