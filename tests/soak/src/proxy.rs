//! The proxy of a soak: one process or two, of any build.
//! The one rule: it is known to be in force before anything is concluded from it.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs, thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use tests::{Agent, Build, TestNode, agent::AgentCommand, test_node::NODE};

/// How long a start or a change may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// How many looks it takes to see what a process does not hold all the time.
const LOOKS: usize = 10;

/// What runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) build: Build,
    /// Brain and agent apart.
    pub(crate) is_two: bool,
}

/// The running processes.
pub(crate) struct Proxy {
    pub(crate) kind: Kind,
    agent: Agent,
    brain: Option<Agent>,
}

impl Proxy {
    /// Starts it; it is not in force yet.
    pub(crate) fn start(world: &TestNode, kind: Kind) -> Result<Self> {
        if !kind.is_two {
            let agent = plain(world.command(kind.build)).start(world.sandbox())?;
            return Ok(Self { kind, agent, brain: None });
        }
        let brain = brain(world, kind.build)?;
        let sandbox = world.sandbox();
        let target = target(world);
        let arguments = [
            "agent".as_ref(),
            "--cgroup".as_ref(),
            sandbox.cgroup().as_os_str(),
            "--pin-dir".as_ref(),
            sandbox.pins().as_os_str(),
            "--target".as_ref(),
            &target,
            "--node-name".as_ref(),
            NODE.as_ref(),
        ];
        let agent = plain(AgentCommand::new(&kind.build.binary(), &arguments)).start(sandbox)?;
        Ok(Self { kind, agent, brain: Some(brain) })
    }

    /// Waits until all its programs are in force.
    pub(crate) fn wait(&mut self) -> Result<()> {
        let log = self.agent.log_path().to_owned();
        // The log says so only after the links were switched.
        self.agent.wait_until(LIMIT, || fs::read_to_string(&log).is_ok_and(|it| it.contains("in force")))
    }

    /// Waits until `seen` holds, for as long as the proxy lives.
    pub(crate) fn wait_until(&mut self, seen: impl FnMut() -> bool) -> Result<()> {
        self.agent.wait_until(LIMIT, seen)
    }

    /// Kills all of it.
    pub(crate) fn kill(self) -> Result<()> {
        self.agent.kill9()?;
        self.brain.map_or(Ok(()), Agent::kill9)
    }

    /// Kills the brain and starts another; nothing if there is none.
    pub(crate) fn replace_brain(&mut self, world: &TestNode) -> Result<()> {
        if let Some(old) = self.brain.take() {
            old.kill9()?;
            self.brain = Some(brain(world, self.kind.build)?);
        }
        Ok(())
    }

    /// Asks it to end in order.
    pub(crate) fn terminate(self) -> Result<()> {
        for process in [Some(self.agent), self.brain].into_iter().flatten() {
            let status = process.terminate()?;
            if !status.success() {
                bail!("a proxy that was asked to end did so with {status}");
            }
        }
        Ok(())
    }

    /// The process that holds the kernel.
    pub(crate) fn process(&self) -> u32 {
        self.agent.pid()
    }
}

/// With one heap: with one per thread, memory grows by whole heaps while work moves from thread to thread, and that
/// would hide a leak.
fn plain(setting: AgentCommand) -> AgentCommand {
    setting.env("MALLOC_ARENA_MAX", "1")
}

fn target(world: &TestNode) -> OsString {
    let mut target = OsString::from("unix://");
    target.push(world.sandbox().files().join("proxy.sock"));
    target
}

fn brain(world: &TestNode, build: Build) -> Result<Agent> {
    let mut source = OsString::from("file:");
    source.push(world.manifests());
    let target = target(world);
    let arguments: [&OsStr; 7] = [
        "brain".as_ref(),
        "--source".as_ref(),
        &source,
        "--listen".as_ref(),
        &target,
        "--node-name".as_ref(),
        NODE.as_ref(),
    ];
    AgentCommand::new(&build.binary(), &arguments).start(world.sandbox())
}

/// Open files, by kind.
pub(crate) type Files = BTreeMap<String, usize>;

/// What a process holds open, whatever it may be in the middle of: of some looks, the least of each kind.
pub(crate) fn files_at_rest(process: u32) -> Result<Files> {
    let mut least = files(process)?;
    for _ in 0..LOOKS {
        thread::sleep(Duration::from_millis(100));
        let now = files(process)?;
        least.retain(|kind, _| now.contains_key(kind));
        for (kind, count) in &mut least {
            *count = now[kind].min(*count);
        }
    }
    Ok(least)
}

/// Open files, by kind.
fn files(process: u32) -> Result<Files> {
    let folder = format!("/proc/{process}/fd");
    let mut kinds = Files::new();
    for entry in fs::read_dir(folder).with_context(|| format!("process {process} is gone"))? {
        let Ok(target) = fs::read_link(entry?.path()) else { continue };
        let target = target.to_string_lossy();
        // `socket:[123]`, `anon_inode:bpf-map`, or a path.
        let kind = target.split(":[").next().unwrap_or(&target);
        *kinds.entry(kind.to_owned()).or_default() += 1;
    }
    Ok(kinds)
}

/// A process' own memory in kB.
pub(crate) fn memory(process: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let memory =
        status.lines().find_map(|it| it.strip_prefix("RssAnon:")?.split_whitespace().next()?.parse().ok());
    memory.context("the kernel tells no RssAnon")
}
