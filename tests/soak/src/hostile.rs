//! What a hostile soak adds: attackers that run all along, probes as a kubelet sends them, and the memory that is charged
//! to the agent. Each attacker and each check is separate; the other checks of the soak hold for everybody else.

use std::{
    env, fs,
    io::ErrorKind,
    net::Ipv4Addr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use build_tools::command::{KilledOnDrop, status};
use clap::ValueEnum as _;
use tests::{
    MemoryCgroup, NetNs, TestNode, agent::spawn_without_capabilities, eventually, http::health,
    sandbox::move_to,
};

use crate::{attack::Attack, proxy::PROXY_TIMEOUT};

/// How long a kubelet waits for a probe's answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
const PROBE_INTERVAL: Duration = Duration::from_millis(250);
/// How much of what attackers do may be charged to the agent (docs/security.md), in kernel memory.
const MAX_CHARGED: u64 = 35 << 20;

/// The attackers and the checks; the processes end when dropped.
pub(crate) struct Hostile {
    attackers: Vec<(Attack, KilledOnDrop, NetNs, PathBuf)>,
    prober: Option<JoinHandle<()>>,
    probes: Arc<Probes>,
    memory: Option<Charged>,
}

#[derive(Default)]
struct Probes {
    stop: AtomicBool,
    answered: AtomicU64,
    /// While no proxy listened, as during a fault.
    refused: AtomicU64,
    unanswered: AtomicU64,
    slowest_ms: AtomicU64,
}

impl Hostile {
    /// Prepares the checks; the attackers are not started yet.
    pub(crate) fn new(node: &TestNode) -> Self {
        let memory = MemoryCgroup::new(node.sandbox())
            .inspect_err(|error| status("Skipped", &format!("the memory of the agent: {error:#}")))
            .ok()
            .map(|cgroup| Charged { cgroup, before: 0, most: 0 });
        Self { attackers: Vec::new(), prober: None, probes: Arc::default(), memory }
    }

    /// Charges an agent, and the maps that it makes from now on, to a cgroup of its own.
    pub(crate) fn adopt(&self, agent: u32) -> Result<()> {
        self.memory.as_ref().map_or(Ok(()), |it| move_to(&it.cgroup.path(), agent))
    }

    /// Starts every attacker, and the probes in the calling thread's network namespace.
    pub(crate) fn start(&mut self, node: &TestNode) -> Result<()> {
        self.memory.iter_mut().for_each(Charged::remember);
        for (number, attack) in (1..).zip(Attack::value_variants()) {
            let started = Self::attacker(node, number, *attack).with_context(|| format!("{attack:?}"))?;
            self.attackers.push(started);
        }
        let probes = Arc::clone(&self.probes);
        self.prober = Some(thread::spawn(move || {
            while !probes.stop.load(Ordering::Relaxed) {
                for page in ["/livez", "/healthz"] {
                    probes.probe(page);
                }
                thread::sleep(PROBE_INTERVAL);
            }
        }));
        Ok(())
    }

    fn attacker(
        node: &TestNode,
        number: u8,
        attack: Attack,
    ) -> Result<(Attack, KilledOnDrop, NetNs, PathBuf)> {
        let (gateway, own) = (Ipv4Addr::new(10, 250, number, 1), Ipv4Addr::new(10, 250, number, 2));
        let netns = NetNs::new()?;
        let link = format!("attack{number}");
        node.netns().connect_veth(&link, &netns, "eth0")?;
        node.netns().add_interface_address(&format!("{gateway}/24"), &link)?;
        netns.add_interface_address(&format!("{own}/24"), "eth0")?;
        netns.ip(&["route", "add", "default", "via", &gateway.to_string()])?;
        if !attack.is_outside() {
            // What sockets send is swallowed: the attack is on the proxy, not on the endpoints that the victims use.
            netns.ip(&["link", "add", "sink", "type", "veth", "peer", "name", "sink2"])?;
            for it in ["sink", "sink2"] {
                netns.ip(&["link", "set", it, "up", "arp", "off"])?;
            }
            netns.ip(&["route", "add", "10.244.0.0/16", "dev", "sink"])?;
        }
        let parent = if attack.is_outside() { node.sandbox().root_cgroup() } else { node.sandbox().cgroup() };
        let cgroup = parent.join(format!("{}-attack{number}", node.sandbox().name()));
        fs::create_dir(&cgroup).with_context(|| format!("cannot create {}", cgroup.display()))?;
        let child = KilledOnDrop(spawn(&netns, attack, gateway)?);
        move_to(&cgroup, child.0.id())?;
        Ok((attack, child, netns, cgroup))
    }

    /// Ends everything; returns what failed.
    pub(crate) fn finish(&mut self) -> Vec<String> {
        let mut failures = Vec::new();
        self.probes.stop.store(true, Ordering::Relaxed);
        if self.prober.take().is_some_and(|it| it.join().is_err()) {
            failures.push("the thread of the probes panicked".to_owned());
        }
        let unanswered = self.probes.unanswered.load(Ordering::Relaxed);
        if unanswered > 0 || self.probes.answered.load(Ordering::Relaxed) == 0 {
            failures.push(format!("{unanswered} probes were not answered within {PROBE_TIMEOUT:?}"));
        }
        for (attack, mut child, netns, cgroup) in self.attackers.drain(..) {
            if let Ok(Some(status)) = child.0.try_wait() {
                failures.push(format!("the attacker {attack:?} ended early: {status}"));
            }
            drop((child, netns));
            eventually(PROXY_TIMEOUT, || fs::remove_dir(&cgroup).is_ok());
        }
        failures.extend(self.memory.as_ref().and_then(Charged::failure));
        failures
    }

    /// Updates the most memory that was charged to the agent.
    pub(crate) fn observe(&mut self) {
        self.memory.iter_mut().for_each(Charged::observe);
    }

    pub(crate) fn rows(&self) -> Vec<(&'static str, u64)> {
        let Probes { answered, refused, unanswered, slowest_ms, .. } = &*self.probes;
        let counts = [
            ("probes answered", answered),
            ("probes while no proxy listened", refused),
            ("slowest answer to a probe, in ms", slowest_ms),
            ("PROBES UNANSWERED", unanswered),
        ];
        let counts = counts.map(|(name, it)| (name, it.load(Ordering::Relaxed)));
        let memory = self
            .memory
            .iter()
            .map(|it| ("charged to the agent by attackers at most, in kB", it.growth() >> 10));
        counts.into_iter().chain(memory).collect()
    }
}

impl Probes {
    fn probe(&self, page: &str) {
        let began = Instant::now();
        let result = health(page);
        let took = began.elapsed();
        let counter = match result {
            Ok(_) if took <= PROBE_TIMEOUT => {
                self.slowest_ms.fetch_max(took.as_millis() as u64, Ordering::Relaxed);
                &self.answered
            }
            Err(error)
                if took <= PROBE_TIMEOUT
                    && !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
            {
                &self.refused
            }
            _ => &self.unanswered,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Starts this program as an attacker without capabilities, in a network namespace.
fn spawn(netns: &NetNs, attack: Attack, gateway: Ipv4Addr) -> Result<Child> {
    let name = attack.to_possible_value().context("an attack has a name")?;
    let mut command = Command::new(env::current_exe()?);
    command.args(["--attack", name.get_name(), "--gateway", &gateway.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    netns.run(|| spawn_without_capabilities(&mut command)).context("cannot start an attacker")
}

struct Charged {
    cgroup: MemoryCgroup,
    before: u64,
    most: u64,
}

impl Charged {
    /// Takes the memory to compare with: without attackers, but after every map has had its maximum size.
    fn remember(&mut self) {
        self.before = self.cgroup.kernel().unwrap_or_default();
    }

    fn observe(&mut self) {
        self.most = self.most.max(self.cgroup.kernel().unwrap_or_default());
    }

    fn growth(&self) -> u64 {
        self.most.saturating_sub(self.before)
    }

    fn failure(&self) -> Option<String> {
        let is_exceeded = self.growth() > MAX_CHARGED;
        is_exceeded
            .then(|| format!("{} bytes were charged to the agent, more than {MAX_CHARGED}", self.growth()))
    }
}
