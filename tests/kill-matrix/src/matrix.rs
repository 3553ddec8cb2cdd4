//! What the proxy does while it is interrupted, and what must hold afterwards.
//!
//! Invariant: under load no connect fails, and once an endpoint of a state has answered, none of the state before does. The
//! next start completes what was interrupted.

use std::{
    fmt, fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use tests::{
    Agent, AgentCommand, Build, ConnectLoad, TIMEOUT, TestNode, Transport,
    agent::APPLIED,
    eventually,
    fixtures::TARGET_PORT,
    load::ConnectSample,
    manifest::{self, Service},
    run, scaled,
    test_node::{NODE, expected_dump},
};

use crate::trace::{Interruption, Intervention, Order};

/// The names of the tracer's files.
const ORDER: &str = "order";
const STEPS: &str = "steps";

/// How many states have distinct endpoints.
const DISTINCT: usize = 3;
/// How many endpoints a state has.
const ENDPOINTS: usize = 2;

/// The node's address, and a Service's address at which packets from outside are forwarded whole.
const NODE_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 50, 1));
const FORWARDED: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1));

/// How many Services there are at most beside those under load.
const MAX_OTHERS: usize = 3_000;

/// How long the proxy goes on after a state has become active, for steps that follow.
const SETTLING: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Scenario {
    /// It starts on a node that another one has served.
    Start,
    /// It starts on a new node.
    First,
    /// Services change.
    Update,
    /// More Services come than the maps have room for.
    Growth,
    /// It starts with another layout of the maps. The state stays: between two layouts, one program after the other is replaced.
    Upgrade,
    /// It starts with the layout before.
    Downgrade,
    /// It removes everything.
    Cleanup,
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().expect("it is not skipped").get_name())
    }
}

impl Scenario {
    /// Whether a proxy that runs goes through it; the others begin with a start.
    fn is_change(self) -> bool {
        matches!(self, Self::Update | Self::Growth)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was killed, and the next start completed it.
    Killed,
    /// It ended with an error, and the next start completed it.
    Ended,
    /// It went on and reported a problem.
    Reported,
    /// It went on, and needed not report anything.
    WentOn,
    /// It never came to this step.
    NotReached,
}

/// A node under load, and the states it goes through.
pub(crate) struct Matrix {
    node: TestNode,
    state: usize,
    others: usize,
    loads: Vec<(ConnectLoad, usize)>,
    /// The proxy, where it serves the state under its tracer: the next change needs no start.
    running: Option<Agent>,
    orders: usize,
    pub(crate) connects: usize,
}

impl Matrix {
    pub(crate) fn new(mut node: TestNode) -> Self {
        // The proxy reads the whole connection table with each change, and the load would fill it.
        for timeout in ["tcp_timeout_close", "udp_timeout", "udp_timeout_stream"] {
            let _ = fs::write(format!("/proc/sys/net/netfilter/nf_conntrack_{timeout}"), "1");
        }
        node.serve(1..=(DISTINCT * ENDPOINTS) as u8);
        node.netns().add_address(NODE_ADDRESS).expect("the address is free");
        node.write_file("node.yaml", &manifest::node_with_addresses(NODE, &[NODE_ADDRESS]));
        Self { node, state: 0, others: 0, loads: Vec::new(), running: None, orders: 0, connects: 0 }
    }

    /// Goes through a scenario, interrupted or not; the steps, and the outcome. The error says what did not hold.
    pub(crate) fn go_through(
        &mut self,
        scenario: Scenario,
        interruption: Option<Interruption>,
    ) -> Result<(Vec<String>, Outcome)> {
        let build = if scenario == Scenario::Upgrade { Build::NextLayout } else { Build::Product };
        // Of a scenario that did not come to its end.
        self.end_order();
        self.prepare(scenario)?;
        // How much of the log is of earlier scenarios.
        let mut begin = 0;
        let mut agent = if scenario == Scenario::Cleanup {
            self.order(interruption)?;
            self.traced(self.cleanup())?.start(self.node.sandbox())?
        } else if scenario.is_change() {
            let agent = match self.running.take() {
                Some(agent) => agent,
                None => self.start_and_wait(self.traced(self.command(build))?, build)?,
            };
            begin = agent.log().len();
            self.order(interruption)?;
            self.change(scenario);
            agent
        } else {
            self.change(scenario);
            self.order(interruption)?;
            self.traced(self.command(build))?.start(self.node.sandbox())?
        };
        let outcome = self.await_outcome(scenario, &mut agent, build, begin, interruption);
        let steps = self.end_order();
        let mut outcome = match outcome {
            Ok(it) => it,
            Err(error) => {
                end(agent)?;
                return Err(error);
            }
        };
        match interruption {
            Some(it) if it.step > steps.len() => outcome = Outcome::NotReached,
            // At a step after the state was active.
            Some(it) if it.intervention == Intervention::Kill => {
                agent.wait(TIMEOUT)?;
                outcome = Outcome::Killed;
            }
            _ => {}
        }
        let log = agent.log().split_off(begin);
        let serves = scenario != Scenario::Cleanup && !matches!(outcome, Outcome::Killed | Outcome::Ended);
        if outcome == Outcome::WentOn && scenario.is_change() {
            self.running = Some(agent);
        } else {
            end(agent)?;
        }
        if !serves {
            self.recover(scenario, build)
                .with_context(|| format!("the next start failed; the log before:\n{log}"))?;
        }
        self.check_load().context(log)?;
        Ok((steps, outcome))
    }

    /// Brings the node to where the scenario begins.
    fn prepare(&mut self, scenario: Scenario) -> Result<()> {
        // The maps of a proxy that runs do not become smaller: the last of the larger states is followed by a start.
        let is_largest = scenario == Scenario::Growth && self.others * 2 > MAX_OTHERS;
        if let Some(mut agent) = self.running.take() {
            if let Ok(status) = agent.wait(Duration::ZERO) {
                bail!("the proxy ended after the change before ({status}):\n{}", agent.log());
            }
            if scenario.is_change() && !is_largest {
                self.running = Some(agent);
            } else {
                end(agent)?;
            }
        }
        if is_largest {
            self.others = 0;
            self.write();
        }
        match scenario {
            Scenario::First => {
                self.loads.clear();
                let _ = run(&mut self.node.cli("cleanup")).success();
                let pins = self.node.sandbox().pins();
                if !pins.exists() {
                    fs::create_dir(pins)?;
                }
                return Ok(());
            }
            Scenario::Cleanup => self.loads.clear(),
            _ => {}
        }
        let before = if scenario == Scenario::Downgrade { Build::NextLayout } else { Build::Product };
        if self.node.layouts() != [before.layout()] {
            self.write();
            self.start_and_wait(self.command(before), before)?.kill9()?;
        }
        if self.loads.is_empty() && scenario != Scenario::Cleanup {
            let [a, b] = frontends();
            self.loads = [(Transport::Tcp, a), (Transport::Tcp, b), (Transport::UdpUnconnected, a)]
                .map(|(transport, address)| {
                    (ConnectLoad::start(transport, address, 1, scaled(Duration::from_millis(5))), 0)
                })
                .into();
        }
        Ok(())
    }

    /// Waits until the scenario that began at this position of the log has ended, in whatever way.
    fn await_outcome(
        &self,
        scenario: Scenario,
        agent: &mut Agent,
        build: Build,
        begin: usize,
        interruption: Option<Interruption>,
    ) -> Result<Outcome> {
        let mut active = None;
        let mut status = None;
        let ended = eventually(TIMEOUT, || {
            status = agent.wait(Duration::ZERO).ok();
            if active.is_none()
                && scenario != Scenario::Cleanup
                && agent.log().get(begin..).is_some_and(|it| it.contains(APPLIED))
                && self.node.dump(build).is_ok_and(|it| self.is_state(&it))
            {
                active = Some(Instant::now());
            }
            status.is_some() || active.is_some_and(|it| it.elapsed() > scaled(SETTLING))
        });
        let log = agent.log().split_off(begin);
        ensure!(ended, "it neither ended nor served the state within {} s:\n{log}", TIMEOUT.as_secs());
        let is_reported = log.contains(" WARN ") || log.contains("ERROR ") || log.contains("error: ");
        let went_on = if is_reported { Outcome::Reported } else { Outcome::WentOn };
        let intervention = interruption.map(|it| it.intervention);
        match (status.and_then(|it| it.code()), intervention) {
            (None, _) => Ok(went_on),
            (Some(0), _) if scenario == Scenario::Cleanup => Ok(went_on),
            (Some(137), Some(Intervention::Kill)) => Ok(Outcome::Killed),
            (Some(_), Some(Intervention::Fail(_))) if is_reported => Ok(Outcome::Ended),
            (Some(code), _) => bail!("it ended with {code}:\n{log}"),
        }
    }

    /// The next start, or the next cleanup, completes what was interrupted.
    fn recover(&mut self, scenario: Scenario, build: Build) -> Result<()> {
        if scenario == Scenario::Cleanup {
            let output = run(&mut self.node.cli("cleanup"));
            ensure!(output.code == Some(0), "cleanup: {}", output.stderr);
            ensure!(!self.node.sandbox().pins().exists(), "left over: {:?}", self.node.pins());
            fs::create_dir(self.node.sandbox().pins())?;
            return Ok(());
        }
        let command = self.command(build);
        let command = if scenario.is_change() { self.traced(command)? } else { command };
        let agent = self.start_and_wait(command, build)?;
        let left: Vec<_> = self.node.pins().into_iter().filter(|it| it.ends_with("_new")).collect();
        ensure!(left.is_empty(), "left over: {left:?}");
        if scenario.is_change() {
            self.running = Some(agent);
            return Ok(());
        }
        agent.kill9()
    }

    fn start_and_wait(&self, command: AgentCommand, build: Build) -> Result<Agent> {
        let mut agent = command.start(self.node.sandbox())?;
        agent.wait_until_applied(TIMEOUT)?;
        let mut found = Ok(Vec::new());
        let result = agent.wait_until(TIMEOUT, || {
            found = self.node.dump(build);
            found.as_ref().is_ok_and(|it| self.is_state(it))
        });
        result.with_context(|| format!("the kernel has {found:#?}"))?;
        Ok(agent)
    }

    /// Whether the sockets' tables and the packets' have this state.
    fn is_state(&self, dump: &[String]) -> bool {
        let mut expected = expected_dump(&self.services());
        let (packets, sockets): (Vec<_>, Vec<_>) = dump.iter().partition(|it| it.starts_with("packets "));
        let endpoints = packets.iter().filter_map(|it| it.strip_prefix("packets endpoint "));
        // A Service that is forwarded serves clients inside and outside with the same set.
        let endpoints = endpoints.map(|it| it.replace(" internal -> ", " -> ").replace(" any -> ", " -> "));
        let is_packets = endpoints.eq(expected.iter().filter_map(|it| it.strip_prefix("backend ")));
        let forwarded = packets.iter().filter(|it| it.starts_with("packets forwarded ")).count();
        let line = |it| format!("forward {FORWARDED}:80/{it} -> {NODE_ADDRESS} rows=1024/1024");
        expected.extend(["TCP", "UDP"].map(line));
        expected.sort_unstable();
        is_packets && forwarded == 2 && sockets.into_iter().eq(&expected)
    }

    fn check_load(&mut self) -> Result<()> {
        let is_now =
            |it: &ConnectSample| it.result.as_ref().is_ok_and(|it| group(it) == self.state % DISTINCT);
        let mut samples = Vec::new();
        for (load, checked) in &mut self.loads {
            ensure!(load.wait_for_new_connects(TIMEOUT), "the load does not go on");
            let new = load.since(*checked);
            *checked += new.len();
            samples.extend(new);
        }
        self.connects += samples.len();
        if let Some(error) = samples.iter().find_map(|it| it.result.as_ref().err()) {
            bail!("a connect failed: {error}");
        }
        let Some(changed) = samples.iter().filter(|it| is_now(it)).map(ConnectSample::ended).min() else {
            ensure!(samples.is_empty(), "the new state never answered");
            return Ok(());
        };
        let late = samples.iter().filter(|it| it.started > changed && !is_now(it)).count();
        ensure!(
            late == 0,
            "{late} connects were answered by the state before, after the new one had answered"
        );
        Ok(())
    }

    fn change(&mut self, scenario: Scenario) {
        if !matches!(scenario, Scenario::Upgrade | Scenario::Downgrade) {
            self.state += 1;
        }
        self.others = match scenario {
            // Twice as many as there is room for.
            Scenario::Growth if self.others == 0 => 300,
            Scenario::Growth => self.others * 2,
            _ => 0,
        };
        self.write();
    }

    fn write(&self) {
        self.node.write(&self.services());
    }

    fn services(&self) -> Vec<Service> {
        let first = (self.state % DISTINCT * ENDPOINTS) as u8 + 1;
        let [a, b] = frontends();
        let service = |name: &str, address: SocketAddr| {
            Service::new(name, &[address.ip()])
                .port("tcp", "TCP", address.port(), TARGET_PORT)
                .port("udp", "UDP", address.port(), TARGET_PORT)
                .endpoints(first..first + ENDPOINTS as u8)
        };
        let other = |n: usize| {
            let address = Ipv4Addr::new(10, 97, (n / 250) as u8, (1 + n % 250) as u8);
            Service::new(&format!("other-{n}"), &[address.into()])
                .port("", "TCP", 80, TARGET_PORT)
                .endpoints([1])
        };
        let forwarded = service("a", a)
            .load_balancer_ips(&[FORWARDED])
            .annotation("kube-proxy-ebpf.io/external-forwarding", "dsr");
        [forwarded, service("b", b)].into_iter().chain((0..self.others).map(other)).collect()
    }

    fn command(&self, build: Build) -> AgentCommand {
        self.node.command(build).env("KUBE_PROXY_EBPF_PACKETS", "nft")
    }

    fn cleanup(&self) -> AgentCommand {
        let command = AgentCommand::new(&Build::Product.binary()).arg("cleanup");
        command.arg("--pin-dir").arg(self.node.sandbox().pins())
    }

    fn traced(&self, command: AgentCommand) -> Result<AgentCommand> {
        let [order, steps] = [ORDER, STEPS].map(|it| self.file(it).display().to_string());
        let tracer = ["trace", "--order", &order, "--steps", &steps, "--"].map(str::to_owned);
        Ok(command.under(&std::env::current_exe()?, tracer.into()))
    }

    /// From now on steps count, and one may be interrupted.
    fn order(&mut self, interruption: Option<Interruption>) -> Result<()> {
        self.orders += 1;
        let order = Order { number: self.orders, interruption };
        let new = self.file("order-new");
        fs::write(&new, serde_json::to_string(&order)?)?;
        Ok(fs::rename(new, self.file(ORDER))?)
    }

    /// From now on no step counts; those that did.
    fn end_order(&self) -> Vec<String> {
        let _ = fs::remove_file(self.file(ORDER));
        let steps = fs::read_to_string(self.file(STEPS)).unwrap_or_default();
        let _ = fs::remove_file(self.file(STEPS));
        steps.lines().map(str::to_owned).collect()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.node.sandbox().files().join(name)
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        // Before the node, whose maps it has.
        if let Some(agent) = self.running.take() {
            let _ = end(agent);
        }
    }
}

/// Kills the traced program, if it still runs, and waits until its tracer has seen the last of it: what is left of it would
/// still hold the lock when the next one starts.
fn end(mut agent: Agent) -> Result<()> {
    let tracer = agent.pid();
    // Empty if the tracer has ended.
    let programs = fs::read_to_string(format!("/proc/{tracer}/task/{tracer}/children")).unwrap_or_default();
    for program in programs.split_whitespace() {
        let _ = kill(Pid::from_raw(program.parse()?), Signal::SIGKILL);
    }
    agent.wait(TIMEOUT).map(drop)
}

/// The frontends under load, of two Services that change together.
fn frontends() -> [SocketAddr; 2] {
    [([10, 96, 0, 1], 80).into(), ([0xfd00, 0x10, 0x96, 0, 0, 0, 0, 2], 81).into()]
}

/// The group of states to which an endpoint belongs, by its server's name.
fn group(server: &str) -> usize {
    let number = server.rsplit('-').next().and_then(|it| it.parse::<usize>().ok()).unwrap_or_default();
    number.saturating_sub(1) / ENDPOINTS
}
