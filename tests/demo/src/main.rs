//! `cargo xtask demo`: the proxy at work, on a cluster that fits into two network namespaces.
//! The one rule: everything shown is measured at real sockets, and the demo fails if a number is not what it should be.

mod interrupt;
mod manifests;
mod phases;
mod pods;
mod screen;
mod topology;

use std::{
    net::SocketAddr,
    path::Path,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use tests::{Agent, Host, Sandbox, Transport, agent::AgentCommand, request, requirements, sandbox};

use build_tools::{
    build,
    command::{status, workspace},
    programs::find_or_install,
};
use clap::Parser;

use interrupt::Interrupted;
use manifests::Manifests;
use pods::Pods;
use screen::{heading, line, number};
use topology::Topology;

/// How long the proxy may take for anything that is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the phases share. Fields are dropped in this order: processes, their namespaces, then the sandbox.
struct Stage {
    agent: Option<Agent>,
    pods: Pods,
    topology: Topology,
    manifests: Manifests,
    setting: AgentCommand,
    tally: Tally,
    sandbox: Sandbox,
}

/// What must be zero at the end, and how much it was zero of.
#[derive(Default)]
struct Tally {
    connects: usize,
    failed: usize,
    wrong: usize,
}

/// Show it at work: a node in a sandbox, real pods, real connections; no cluster needed (as root, about 15 s).
///
/// Builds what is missing first. Fails if one connect fails or one answer comes from the wrong endpoint.
#[derive(Parser)]
#[command(bin_name = "cargo xtask demo", max_term_width = 100)]
struct Arguments {
    /// Leave the sandbox up, and say how to enter it.
    #[arg(long)]
    keep: bool,
    /// Only take down what `--keep` left up.
    #[arg(long, conflicts_with = "keep")]
    clean: bool,
    /// Be a pod of this name.
    #[arg(long, hide = true)]
    pod: Option<String>,
    #[arg(hide = true, requires = "pod")]
    addresses: Vec<SocketAddr>,
}

fn main() -> ExitCode {
    let Arguments { keep, clean, pod, addresses } = Arguments::parse();
    let result = match pod {
        Some(name) => pods::serve(&name, &addresses),
        None if clean => self::clean(),
        None => run(keep),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Interrupted>() => {
            eprintln!("\n{error}");
            ExitCode::from(Interrupted::EXIT_CODE)
        }
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Shows everything.
fn run(keep: bool) -> Result<()> {
    let machine = machine()?;
    find_or_install("ip", "iproute2")?;
    let binary = build::build(false)?;
    clean_up(&machine);

    interrupt::watch()?;
    let started = Instant::now();
    let mut stage = match Stage::new(&machine, &binary) {
        Err(_) if interrupt::check().is_err() => return Err(Interrupted.into()),
        other => other?,
    };
    // What fails after Ctrl-C, fails because of it.
    let shown = stage.show().or_else(|error| interrupt::check().and(Err(error)));
    let Tally { connects, failed, wrong } = stage.tally;
    if let Err(error) = shown {
        if let Some(agent) = stage.agent.as_ref().filter(|_| !error.is::<Interrupted>()) {
            eprintln!("\nThe agent said:\n{}", agent.log());
        }
        return Err(error);
    }

    heading("Σ", "All of it");
    line(&format!(
        "{} connects, {} failed, {} answered by the wrong endpoint, in {:.1} s.",
        number(connects),
        number(failed),
        number(wrong),
        started.elapsed().as_secs_f64(),
    ));
    if failed + wrong > 0 {
        bail!("{failed} connects failed and {wrong} were answered by the wrong endpoint; both must be 0");
    }
    if keep {
        return stage.keep(&binary);
    }
    drop(stage);
    line("The sandbox is taken down: no process, namespace, cgroup or pin is left.");
    Ok(())
}

/// Takes down what an earlier demo was asked to keep, or could not take down.
pub(crate) fn clean() -> Result<()> {
    clean_up(&machine()?);
    Ok(())
}

fn clean_up(machine: &Host) {
    for name in sandbox::remove_stale(machine, true) {
        status("Swept", &name);
    }
    topology::sweep();
}

fn machine() -> Result<Host> {
    requirements().map_err(|missing| {
        let lines: Vec<_> = missing.iter().map(|it| format!("  - {it}")).collect();
        anyhow::anyhow!("the demo cannot run here:\n{}", lines.join("\n"))
    })
}

impl Stage {
    fn new(machine: &Host, binary: &Path) -> Result<Self> {
        let sandbox = Sandbox::new("demo")?;
        let topology = Topology::new()?;
        let manifests =
            Manifests::copy(&workspace().join("deploy/demo"), &sandbox.files().join("manifests"))?;
        let pods = Pods::start(&topology, &sandbox, &manifests.pods()?)?;
        // The machine's own packets are none of the demo's.
        let setting = AgentCommand::run(binary, &sandbox, manifests.folder(), "n1").arg("--packets=off");

        heading("0", "A node in a sandbox");
        line(&format!("Linux {}; the proxy is attached to one cgroup only.", machine.kernel));
        line(&format!(
            "{} pods live in one network namespace, the client in another; no route leads to a Service's address.",
            pods.count()
        ));
        println!();
        let command = setting.line().replace(&format!("{}/", workspace().display()), "");
        line(&format!("$ {}", command.replace(" --", " \\\n         --")));
        println!();
        Ok(Self { agent: None, pods, topology, manifests, setting, tally: Tally::default(), sandbox })
    }

    fn show(&mut self) -> Result<()> {
        let started = Instant::now();
        self.start_agent()?;
        self.wait_until_served()?;
        line(&format!("The first connect was served {} ms after the start.", started.elapsed().as_millis()));

        // From here on this process is the client.
        let _inside = self.sandbox.enter()?;
        phases::every_service_answers(self)?;
        phases::scaling_under_load(self)?;
        phases::death_and_return(self)?;
        phases::nothing_behind_it(self)
    }

    fn start_agent(&mut self) -> Result<()> {
        self.agent = Some(self.setting.start(&self.sandbox)?);
        Ok(())
    }

    fn agent(&mut self) -> Result<&mut Agent> {
        self.agent.as_mut().context("the agent runs")
    }

    fn wait_until_served(&mut self) -> Result<()> {
        let address = self.manifests.service("web")?.addresses()[0];
        let inside = self.sandbox.enter()?;
        let client = self.topology.client()?;
        let served = self
            .agent()?
            .wait_until(PATIENCE, || interrupt::check().is_err() || request(Transport::Tcp, address).is_ok());
        drop((client, inside));
        served
    }

    /// Leaves everything up and says how to get in and how to get rid of it.
    fn keep(mut self, binary: &Path) -> Result<()> {
        let agent = self.agent.take().context("the agent runs")?.leave();
        let cgroup = self.sandbox.cgroup().join("cgroup.procs");
        let shell = format!(
            "sh -c 'echo $$ > {}; exec nsenter --net=/run/netns/{} bash'",
            cgroup.display(),
            self.topology.client_name(),
        );
        let web = self.manifests.service("web")?.addresses()[0];
        heading("→", "The sandbox stays up");
        line("A shell where the client is:");
        line(&format!("  {shell}"));
        line("In it, ask a Service who answers:");
        line(&format!("  head -n 1 < /dev/tcp/{}/{}", web.ip(), web.port()));
        line("What is programmed:");
        line(&format!("  {} dump --pin-dir {}", binary.display(), self.sandbox.pins().display()));
        line("The manifests, to be edited:");
        line(&format!("  {}", self.manifests.folder().display()));
        line("What the agent says:");
        line(&format!("  tail -f {}/agent-*.log", self.sandbox.files().display()));
        line("Take it down:");
        line("  cargo xtask demo --clean");
        self.pods.leave();
        self.topology.leave();
        self.sandbox.keep(agent)
    }
}

impl Tally {
    fn add(&mut self, report: &tests::load::LoadReport, may_answer: &[String]) {
        self.connects += report.connects;
        self.failed += report.failed;
        let strangers = report.by.iter().filter(|(name, _)| !may_answer.contains(name));
        self.wrong += strangers.map(|(_, count)| count).sum::<usize>();
        for error in &report.errors {
            line(&format!("failed: {error}"));
        }
    }
}

/// This program, once more.
fn ourselves() -> Result<Command> {
    Ok(Command::new(std::env::current_exe().context("where is this program?")?))
}
