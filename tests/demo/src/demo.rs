//! The demo's node: pods, manifests, and the agent in a sandbox.

use std::{net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use build_tools::command::workspace;
use tests::{
    Agent, EchoConnection, Host, Sandbox, Transport, agent::AgentCommand, load::LoadReport, request,
};

use crate::{
    cluster::Cluster,
    interrupt,
    manifests::Manifests,
    screen::{heading, line},
};

/// How long the proxy may take for a change.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// What the phases share. Fields are dropped in this order: processes, their namespaces, then the sandbox.
pub(crate) struct Demo {
    pub(crate) agent: Option<Agent>,
    pub(crate) cluster: Cluster,
    pub(crate) manifests: Manifests,
    command: AgentCommand,
    pub(crate) totals: Totals,
    pub(crate) sandbox: Sandbox,
}

/// How many connects there were, and how many were wrong: that must be 0.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) connects: usize,
    pub(crate) failed: usize,
    /// Answered by an endpoint that the Service did not have.
    pub(crate) wrong: usize,
}

impl Demo {
    pub(crate) fn new(host: &Host, binary: &Path, ui: Option<SocketAddr>) -> Result<Self> {
        let sandbox = Sandbox::new("demo")?;
        let manifests =
            Manifests::copy(&workspace().join("deploy/demo"), &sandbox.files().join("manifests"))?;
        let cluster = Cluster::start(&sandbox, &manifests.pods()?)?;
        // The nftables path would affect the host's own packets.
        let command = AgentCommand::run(binary, &sandbox, &manifests.folder, "n1").arg("--packets=off");
        let command = command.args(ui.map(|it| format!("--ui={it}")));

        heading("0", "A node in a sandbox");
        line(&format!("Linux {}; the proxy is attached to one cgroup only.", host.kernel));
        line(&format!(
            "{} pods are in one network namespace, the client is in another; there is no route to a Service's address.",
            cluster.pods.len()
        ));
        println!();
        let text = command.line().replace(&format!("{}/", workspace().display()), "");
        line(&format!("$ {}", text.replace(" --", " \\\n         --")));
        println!();
        Ok(Self { agent: None, cluster, manifests, command, totals: Totals::default(), sandbox })
    }

    pub(crate) fn start_agent(&mut self) -> Result<()> {
        self.agent = Some(self.command.start(&self.sandbox)?);
        Ok(())
    }

    pub(crate) fn agent(&mut self) -> Result<&mut Agent> {
        self.agent.as_mut().context("the agent runs")
    }

    pub(crate) fn wait_until_served(&mut self) -> Result<()> {
        let address = self.manifests.web()?.addresses()[0];
        let inside = self.sandbox.enter()?;
        let client = self.cluster.client.enter()?;
        let served = self
            .agent()?
            .wait_until(TIMEOUT, || interrupt::is_requested() || request(Transport::Tcp, address).is_ok());
        drop((client, inside));
        served
    }

    /// The names of the endpoints of `web`, as in its manifest.
    pub(crate) fn web_endpoints(&self) -> Result<Vec<String>> {
        let mut names: Vec<_> = self.manifests.web()?.endpoints.iter().map(|it| it.0.clone()).collect();
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Long-lived connections to every address of `web`.
    pub(crate) fn connections(&self) -> Result<Vec<EchoConnection>> {
        let _client = self.cluster.client.enter()?;
        let addresses = self.manifests.web()?.addresses();
        let connect = |&it| EchoConnection::connect(it).with_context(|| format!("cannot connect to {it}"));
        addresses.iter().cycle().take(8).map(connect).collect()
    }
}

impl Totals {
    pub(crate) fn add(&mut self, report: &LoadReport, may_answer: &[String]) {
        self.connects += report.connects;
        self.failed += report.failed;
        let wrong = report.by_server.iter().filter(|(name, _)| !may_answer.contains(name));
        self.wrong += wrong.map(|(_, count)| count).sum::<usize>();
        for error in &report.errors {
            line(&format!("failed: {error}"));
        }
    }
}
