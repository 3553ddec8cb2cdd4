//! The proxy itself, as a process, with the capabilities that its DaemonSet gives it and no others.
//! The one rule: what it says is kept, and shown when a test fails.

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set, set_no_new_privs};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use crate::{Sandbox, deploy, eventually};

/// What the log says of every state that became active.
pub const APPLIED: &str = "state active";

/// How to start a proxy.
#[derive(Clone, Debug)]
pub struct AgentCommand {
    binary: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    capabilities: Option<CapabilitySet>,
    without_netfilter: bool,
}

impl AgentCommand {
    /// `BINARY run` on a folder of manifests, for one node, in a sandbox.
    #[must_use]
    pub fn run(binary: &Path, sandbox: &Sandbox, manifests: &Path, node: &str) -> Self {
        Self::new(binary, &["run".as_ref()]).source(manifests).node(node).kernel(sandbox)
    }

    /// `BINARY brain` on a folder of manifests, for one node; it serves [`Self::agent`] in the same sandbox.
    #[must_use]
    pub fn brain(binary: &Path, sandbox: &Sandbox, manifests: &Path, node: &str) -> Self {
        Self::new(binary, &["brain".as_ref()])
            .source(manifests)
            .node(node)
            .arg("--listen")
            .arg(target(sandbox))
    }

    /// `BINARY agent`, which follows the [`Self::brain`] of the same sandbox.
    #[must_use]
    pub fn agent(binary: &Path, sandbox: &Sandbox, node: &str) -> Self {
        Self::new(binary, &["agent".as_ref()]).node(node).kernel(sandbox).arg("--target").arg(target(sandbox))
    }

    fn source(self, manifests: &Path) -> Self {
        let mut source = OsString::from("file:");
        source.push(manifests);
        self.arg("--source").arg(source)
    }

    /// For this node.
    #[must_use]
    pub fn node(self, node: &str) -> Self {
        self.arg("--node-name").arg(node)
    }

    /// In the cgroup and with the pins of a sandbox.
    #[must_use]
    pub fn kernel(self, sandbox: &Sandbox) -> Self {
        self.arg("--cgroup").arg(sandbox.cgroup()).arg("--pin-dir").arg(sandbox.pins())
    }

    /// `BINARY` with arguments of any kind. Packets are left alone unless one of them says otherwise: most places that a
    /// proxy is started in are not its own, and what is in no sandbox should not be translated.
    #[must_use]
    pub fn new(binary: &Path, arguments: &[&OsStr]) -> Self {
        let arguments = arguments.iter().map(|&it| it.to_owned()).collect();
        let environment = vec![("KUBE_PROXY_EBPF_PACKETS".into(), "off".into())];
        Self {
            binary: binary.to_owned(),
            arguments,
            environment,
            capabilities: None,
            without_netfilter: false,
        }
    }

    /// Another argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// An environment variable.
    #[must_use]
    pub fn env(mut self, key: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((key.into(), value.into()));
        self
    }

    /// Another binary, for an upgrade.
    #[must_use]
    pub fn binary(mut self, binary: &Path) -> Self {
        binary.clone_into(&mut self.binary);
        self
    }

    /// Other capabilities than those of the DaemonSet.
    #[must_use]
    pub fn capabilities(mut self, capabilities: CapabilitySet) -> Self {
        self.capabilities = Some(capabilities);
        self
    }

    /// Without a way to netfilter, as where the kernel has none.
    #[must_use]
    pub fn without_netfilter(mut self) -> Self {
        self.without_netfilter = true;
        self
    }

    /// The command line, as one would type it.
    #[must_use]
    pub fn line(&self) -> String {
        let words =
            std::iter::once(self.binary.as_os_str()).chain(self.arguments.iter().map(OsString::as_os_str));
        words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
    }

    /// Starts it, inside the sandbox's cgroup, so that it cannot outlive the sandbox.
    ///
    /// # Errors
    ///
    /// If the binary cannot be started.
    pub fn start(&self, sandbox: &Sandbox) -> Result<Agent> {
        let log = sandbox.files().join(format!("agent-{}.log", count(sandbox.files())));
        let stderr = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let capabilities = self.capabilities.map_or_else(deploy::capabilities, Ok)?;
        let mut command = Command::new(&self.binary);
        command
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(key, value)| (key, value)))
            // Ctrl-C is for whoever watches it.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(stderr.try_clone()?)
            .stderr(stderr);
        let child = spawn_with(capabilities, self.without_netfilter, &mut command)
            .with_context(|| format!("cannot start `{}`", self.line()))?;
        let agent = Agent { child, log, left: false };
        sandbox.adopt(agent.pid())?;
        Ok(agent)
    }
}

/// The unix socket between brain and agent.
fn target(sandbox: &Sandbox) -> OsString {
    let mut target = OsString::from("unix://");
    target.push(sandbox.files().join("proxy.sock"));
    target
}

/// Starts a program that can never have other capabilities than these, whoever it runs as.
fn spawn_with(
    capabilities: CapabilitySet,
    without_netfilter: bool,
    command: &mut Command,
) -> io::Result<Child> {
    let bounded = || {
        // Those that have a name; the others are none.
        for (_, capability) in CapabilitySet::all().difference(capabilities).iter_names() {
            remove_capability_from_bounding_set(capability)?;
        }
        set_no_new_privs(true)?;
        if without_netfilter {
            refuse_netfilter().map_err(io::Error::other)?;
        }
        command.spawn()
    };
    // What is given up is given up by a thread, for itself and for what it starts.
    thread::scope(|scope| {
        scope.spawn(bounded).join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
    })
}

/// From now on, no netlink socket to netfilter is made for this thread and what it starts.
fn refuse_netfilter() -> Result<(), seccompiler::Error> {
    let argument = |index, value: i32| {
        let value = u64::from(value.cast_unsigned());
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
    };
    let rule = SeccompRule::new(vec![
        argument(0, nix::libc::AF_NETLINK)?,
        argument(2, nix::libc::NETLINK_NETFILTER)?,
    ])?;
    let filter = SeccompFilter::new(
        BTreeMap::from([(nix::libc::SYS_socket, vec![rule])]),
        SeccompAction::Allow,
        SeccompAction::Errno(nix::libc::EPROTONOSUPPORT.cast_unsigned()),
        env::consts::ARCH.try_into()?,
    )?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)
}

fn count(folder: &Path) -> usize {
    fs::read_dir(folder).map_or(0, |it| {
        it.flatten().filter(|file| file.file_name().to_string_lossy().starts_with("agent-")).count()
    })
}

/// A running proxy; killed when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    log: PathBuf,
    left: bool,
}

impl Agent {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has said so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The file that what it says is kept in.
    #[must_use]
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Kills it without a chance to do anything, and waits until it is gone.
    ///
    /// # Errors
    ///
    /// If it was gone before.
    pub fn kill9(mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the agent ended by itself: {status}\n{}", self.log());
        }
        self.child.kill()?;
        let status = self.child.wait()?;
        if status.signal() != Some(Signal::SIGKILL as i32) {
            bail!("the agent ended by itself: {status}\n{}", self.log());
        }
        Ok(())
    }

    /// Asks it to end, and waits until it has.
    ///
    /// # Errors
    ///
    /// If it does not end within five seconds.
    pub fn terminate(mut self) -> Result<ExitStatus> {
        kill(Pid::from_raw(self.pid().cast_signed()), Signal::SIGTERM).context("kill(SIGTERM)")?;
        self.wait(Duration::from_secs(5))
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    ///
    /// If it does not within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let mut status = None;
        let ended = eventually(limit, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        });
        match status {
            Some(status) if ended => Ok(status),
            _ => bail!("the agent still runs after {} s\n{}", limit.as_secs(), self.log()),
        }
    }

    /// Waits until `ready` holds.
    ///
    /// # Errors
    ///
    /// If the agent ends first, or it does not hold within `limit`: with all it said.
    pub fn wait_until(&mut self, limit: Duration, mut ready: impl FnMut() -> bool) -> Result<()> {
        let mut ended = None;
        let done = eventually(limit, || {
            ended = self.child.try_wait().ok().flatten();
            ended.is_some() || ready()
        });
        if let Some(status) = ended {
            bail!("the agent ended ({status}); it said:\n{}", self.log());
        }
        if !done {
            bail!("the agent is not ready after {} s; it said:\n{}", limit.as_secs(), self.log());
        }
        Ok(())
    }

    /// Waits until its log says that a state is active: the programs are attached by then.
    ///
    /// # Errors
    ///
    /// As for [`Self::wait_until`].
    pub fn wait_until_applied(&mut self, limit: Duration) -> Result<()> {
        let log = self.log.clone();
        self.wait_until(limit, || fs::read_to_string(&log).is_ok_and(|it| it.contains(APPLIED)))
    }

    /// A figure of its memory in kB: a field of `/proc/PID/status`, such as `VmRSS`.
    ///
    /// # Errors
    ///
    /// If it has ended, or the kernel has no such field.
    pub fn memory_kb(&self, field: &str) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let value = status.lines().find_map(|it| it.strip_prefix(field)?.strip_prefix(':'));
        let value = value.and_then(|it| it.trim().trim_end_matches(" kB").parse().ok());
        value.with_context(|| format!("no {field} in /proc/PID/status"))
    }

    /// Leaves it running when dropped.
    #[must_use]
    pub fn leave(mut self) -> u32 {
        self.left = true;
        self.pid()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- what the agent said:\n{}---", self.log());
        }
        if !self.left {
            // It may be gone already.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
