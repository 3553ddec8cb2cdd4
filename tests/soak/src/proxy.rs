//! The proxy of a soak: any build, in one process or split into brain and agent.

use std::{collections::BTreeMap, fs, thread, time::Duration};

use anyhow::{Context as _, Result, bail};
use tests::{
    Agent, Build, TestNode,
    agent::{AgentCommand, SLOW_PROGRAMS},
    test_node::NODE,
};

/// How long a start or a change may take.
pub(crate) const PROXY_TIMEOUT: Duration = Duration::from_secs(30);

/// How often open files are counted, to disregard those that are open only briefly.
const FILE_SAMPLES: usize = 10;

/// A build, and how it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProxyKind {
    pub(crate) build: Build,
    /// As two processes, brain and agent.
    pub(crate) is_split: bool,
}

pub(crate) struct Proxy {
    pub(crate) kind: ProxyKind,
    /// The process that attaches programs and writes maps.
    pub(crate) agent: Agent,
    brain: Option<Agent>,
}

impl Proxy {
    /// Starts it; its programs are not attached yet.
    pub(crate) fn start(node: &TestNode, kind: ProxyKind) -> Result<Self> {
        let brain = kind.is_split.then(|| start_brain(node, kind.build)).transpose()?;
        let command = if kind.is_split {
            AgentCommand::agent(&kind.build.binary(), node.sandbox(), NODE)
        } else {
            node.command(kind.build)
        };
        // With one heap per thread, memory would grow by whole heaps while work moves between threads, which would hide a leak.
        let (fault, slow) = SLOW_PROGRAMS;
        let command = command.env("MALLOC_ARENA_MAX", "1").env(fault, slow);
        let agent = command.start(node.sandbox())?;
        Ok(Self { kind, agent, brain })
    }

    pub(crate) fn kill(self) -> Result<()> {
        self.agent.kill9()?;
        self.brain.map_or(Ok(()), Agent::kill9)
    }

    /// Kills the brain and starts another, if there is one.
    pub(crate) fn replace_brain(&mut self, node: &TestNode) -> Result<()> {
        if let Some(old) = self.brain.take() {
            old.kill9()?;
            self.brain = Some(start_brain(node, self.kind.build)?);
        }
        Ok(())
    }

    /// Sends SIGTERM and checks the exit codes.
    pub(crate) fn terminate(self) -> Result<()> {
        for process in [Some(self.agent), self.brain].into_iter().flatten() {
            let status = process.terminate()?;
            if !status.success() {
                bail!("after SIGTERM, a process of the proxy ended with {status}");
            }
        }
        Ok(())
    }
}

fn start_brain(node: &TestNode, build: Build) -> Result<Agent> {
    let sandbox = node.sandbox();
    AgentCommand::brain(&build.binary(), sandbox, &node.manifests(), NODE).start(sandbox)
}

/// The open files of an idle process, by kind: the minimum of some samples.
pub(crate) fn open_files(pid: u32) -> Result<BTreeMap<String, usize>> {
    let mut minimum = current_open_files(pid)?;
    for _ in 0..FILE_SAMPLES {
        thread::sleep(Duration::from_millis(100));
        let now = current_open_files(pid)?;
        minimum.retain(|kind, _| now.contains_key(kind));
        for (kind, count) in &mut minimum {
            *count = now[kind].min(*count);
        }
    }
    Ok(minimum)
}

fn current_open_files(pid: u32) -> Result<BTreeMap<String, usize>> {
    let mut kinds = BTreeMap::new();
    for entry in
        fs::read_dir(format!("/proc/{pid}/fd")).with_context(|| format!("process {pid} has ended"))?
    {
        let Ok(target) = fs::read_link(entry?.path()) else { continue };
        let target = target.to_string_lossy();
        // `socket:[123]`, `anon_inode:bpf-map`, or a path.
        let kind = target.split(":[").next().unwrap_or(&target);
        *kinds.entry(kind.to_owned()).or_default() += 1;
    }
    Ok(kinds)
}
