//! The binary under test: one-shot commands, and the proxy as a process with exactly the capabilities of its DaemonSet.
//!
//! The log of a proxy is kept, and printed when its test fails.

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::PipeWriter,
    mem,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    str::FromStr as _,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set, set_no_new_privs};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use syscalls::Sysno;

use build_tools::command::line;

pub use build_tools::build::Build;

use crate::{MemoryCgroup, Sandbox, TIMEOUT, deploy, eventually, sandbox::move_to};

/// Makes every decision of the programs take long, in the builds that have faults.
pub const SLOW_PROGRAMS: (&str, &str) = ("KUBE_PROXY_EBPF_FAULT", "slow-programs");

/// Logged whenever a state has become active, after the programs were attached.
pub const APPLIED: &str = "state active";

#[derive(Clone, Debug)]
pub struct Output {
    /// The exit code; `None` after a signal.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// Standard output of a command that must succeed.
    #[track_caller]
    pub fn success(self) -> String {
        assert_eq!(self.code, Some(0), "{}{}", self.stdout, self.stderr);
        self.stdout
    }

    /// Standard error of a command that must end with this code.
    #[track_caller]
    pub fn exits_with(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        self.stderr
    }
}

/// Runs a command, which must start and write UTF-8, to its end.
#[track_caller]
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    let text = |bytes| String::from_utf8(bytes).expect("commands write UTF-8");
    Output { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// A subcommand of a binary that finds the proxy of a sandbox by its environment, as a command in the pod does.
pub fn cli(binary: &Path, sandbox: &Sandbox, subcommand: &str) -> Command {
    let mut command = Command::new(binary);
    command.arg(subcommand).env(STATUS_SOCKET, status_socket(sandbox));
    command.env("KUBE_PROXY_EBPF_PIN_DIR", sandbox.pins());
    command
}

/// The command line and the environment of a proxy.
#[derive(Clone, Debug)]
#[must_use]
pub struct AgentCommand {
    binary: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    capabilities: Option<CapabilitySet>,
    without_netfilter: bool,
    without_profile: bool,
    memory_cgroup: Option<PathBuf>,
    log: Option<Arc<PipeWriter>>,
}

impl AgentCommand {
    /// `BINARY run` with a folder of manifests as its source, for one node, in a sandbox.
    pub fn run(binary: &Path, sandbox: &Sandbox, manifests: &Path, node: &str) -> Self {
        Self::new(binary).arg("run").source(manifests).node(node).kernel(sandbox)
    }

    /// `BINARY run` that follows the API server at a URL, for one node, in a sandbox.
    pub fn kube(binary: &Path, sandbox: &Sandbox, url: &str, node: &str) -> Self {
        let command = Self::new(binary).args(["run", "--source=kube"]);
        command.arg(format!("--kube-api-server={url}")).node(node).kernel(sandbox)
    }

    /// `BINARY brain` with a folder of manifests as its source, for one node; [`Self::agent`] in the same sandbox uses it.
    pub fn brain(binary: &Path, sandbox: &Sandbox, manifests: &Path, node: &str) -> Self {
        let command = Self::new(binary).arg("brain").source(manifests).node(node);
        command.arg("--listen").arg(brain_socket(sandbox))
    }

    /// `BINARY agent` with the [`Self::brain`] of the same sandbox.
    pub fn agent(binary: &Path, sandbox: &Sandbox, node: &str) -> Self {
        let command = Self::new(binary).arg("agent").node(node).kernel(sandbox);
        command.arg("--target").arg(brain_socket(sandbox))
    }

    fn source(self, manifests: &Path) -> Self {
        self.arg(format!("--source=file:{}", manifests.display()))
    }

    /// Adds `--node-name`.
    pub fn node(self, node: &str) -> Self {
        self.args(["--node-name", node])
    }

    /// `BINARY` without arguments. The packet path is off unless an argument turns it on: most places in which tests
    /// start a proxy share their network namespace with others, whose traffic must not be translated. The log has level
    /// debug, at which each state is in it.
    pub fn new(binary: &Path) -> Self {
        let environment =
            vec![("KUBE_PROXY_EBPF_PACKETS".into(), "off".into()), (VERBOSE.into(), "1".into())];
        Self {
            binary: binary.to_owned(),
            arguments: Vec::new(),
            environment,
            capabilities: None,
            without_netfilter: false,
            without_profile: false,
            memory_cgroup: None,
            log: None,
        }
    }

    pub fn arg(self, argument: impl AsRef<OsStr>) -> Self {
        self.args([argument])
    }

    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|it| it.as_ref().to_owned()));
        self
    }

    /// Adds `--cgroup` and `--pin-dir` of a sandbox.
    pub fn kernel(self, sandbox: &Sandbox) -> Self {
        self.arg("--cgroup").arg(sandbox.cgroup()).arg("--pin-dir").arg(sandbox.pins())
    }

    pub fn env(mut self, key: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((key.into(), value.into()));
        self
    }

    /// Replaces the capabilities of the DaemonSet.
    pub fn capabilities(mut self, capabilities: CapabilitySet) -> Self {
        self.capabilities = Some(capabilities);
        self
    }

    /// Denies netlink sockets of netfilter, as on a kernel without it.
    pub fn without_netfilter(mut self) -> Self {
        self.without_netfilter = true;
        self
    }

    /// Has `program` start this one, with these arguments before the binary's name; the process may make system calls that the
    /// shipped profile does not allow.
    pub fn under(mut self, program: &Path, arguments: Vec<String>) -> Self {
        let binary = mem::replace(&mut self.binary, program.to_owned());
        let arguments = arguments.into_iter().map(OsString::from).chain([binary.into()]);
        self.arguments.splice(..0, arguments);
        self.without_profile = true;
        self
    }

    /// Moves the process into a memory cgroup as soon as it exists.
    pub fn memory_cgroup(mut self, cgroup: &MemoryCgroup) -> Self {
        self.memory_cgroup = Some(cgroup.path());
        self
    }

    pub fn log_to(mut self, pipe: PipeWriter) -> Self {
        self.log = Some(Arc::new(pipe));
        self
    }

    /// The command line, as one would type it.
    pub fn line(&self) -> String {
        line(&self.command())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(&self.arguments).envs(self.environment.iter().map(|(key, value)| (key, value)));
        command
    }

    /// Starts the proxy inside the sandbox's cgroup, so that it cannot outlive the sandbox.
    pub fn start(&self, sandbox: &Sandbox) -> Result<Agent> {
        let log = sandbox.files().join(format!("agent-{}.log", count_logs(sandbox.files())));
        let stderr = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let capabilities = self.capabilities.map_or_else(deploy::capabilities, Ok)?;
        let mut command = self.command();
        // Not the node's, which tests would share.
        command.env(STATUS_SOCKET, status_socket(sandbox));
        command
            // Ctrl-C must reach the harness only.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(stderr.try_clone()?)
            .stderr(stderr);
        if let Some(pipe) = &self.log {
            command.stderr(pipe.try_clone()?);
        }
        let filter = || {
            // A test that gives more than the DaemonSet does starts programs of others as well.
            if !self.without_profile && !capabilities.contains(CapabilitySet::SYS_ADMIN) {
                apply_profile()?;
            }
            if self.without_netfilter {
                deny_netfilter()?;
            }
            Ok(())
        };
        let child = spawn_with(capabilities, filter, &mut command)
            .with_context(|| format!("cannot start `{}`", self.line()))?;
        let agent = Agent { child, log };
        sandbox.add_process(agent.pid())?;
        if let Some(cgroup) = &self.memory_cgroup {
            move_to(cgroup, agent.pid())?;
        }
        Ok(agent)
    }
}

pub fn brain_socket(sandbox: &Sandbox) -> String {
    format!("unix://{}", sandbox.files().join("proxy.sock").display())
}

pub const STATUS_SOCKET: &str = "KUBE_PROXY_EBPF_STATUS_SOCKET";

/// The socket of the status pages of every proxy in a sandbox.
pub fn status_socket(sandbox: &Sandbox) -> PathBuf {
    sandbox.files().join("status.sock")
}

/// The environment variable with the level of the log.
pub const VERBOSE: &str = "KUBE_PROXY_EBPF_VERBOSE";

/// Starts a program that can never have any capability, even as root.
pub fn spawn_without_capabilities(command: &mut Command) -> Result<Child> {
    spawn_with(CapabilitySet::empty(), || Ok(()), command)
}

/// Starts a program that can never gain other capabilities, even as root, with the filters that `filter` applies to its thread.
fn spawn_with(
    capabilities: CapabilitySet,
    filter: impl FnOnce() -> Result<()> + Send,
    command: &mut Command,
) -> Result<Child> {
    let bounded = || {
        // Only named capabilities exist.
        for (_, capability) in CapabilitySet::all().difference(capabilities).iter_names() {
            remove_capability_from_bounding_set(capability)?;
        }
        set_no_new_privs(true)?;
        filter()?;
        Ok(command.spawn()?)
    };
    // All restrictions hold for a thread and its children: this thread is used once.
    thread::scope(|scope| scope.spawn(bounded).join().unwrap_or_else(|_| bail!("a thread panicked")))
}

/// Ends this thread's children at the first system call that the shipped profile denies: its EPERM might go unnoticed.
fn apply_profile() -> Result<()> {
    let names = deploy::allowed_calls()?;
    // The names are libseccomp's; the table for arm64 has `fstatat` for its `newfstatat`.
    let call =
        |name: &str| Sysno::from_str(name).or_else(|_| Sysno::from_str(name.trim_start_matches("new")));
    // Runtimes pass over names that an architecture does not have, too.
    let numbers = names.iter().filter_map(|it| Some((i64::from(call(it).ok()?.id()), Vec::new())));
    let kill = SeccompAction::KillProcess;
    let filter =
        SeccompFilter::new(numbers.collect(), kill, SeccompAction::Allow, env::consts::ARCH.try_into()?)?;
    Ok(seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?)
}

/// Denies netlink sockets of netfilter to this thread and its children.
fn deny_netfilter() -> Result<(), seccompiler::Error> {
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

fn count_logs(folder: &Path) -> usize {
    fs::read_dir(folder).map_or(0, |it| {
        it.flatten().filter(|file| file.file_name().to_string_lossy().starts_with("agent-")).count()
    })
}

/// A field of `/proc/PID/status` in kB, such as `VmRSS`; fails if the process has ended, or the kernel has no such field.
pub fn memory_kb(process: u32, field: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let value = status.lines().find_map(|it| it.strip_prefix(field)?.strip_prefix(':'));
    let value = value.and_then(|it| it.trim().trim_end_matches(" kB").parse().ok());
    value.with_context(|| format!("no {field} in /proc/PID/status"))
}

/// A running proxy; killed when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    log: PathBuf,
}

impl Agent {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn log_path(&self) -> &Path {
        &self.log
    }

    pub fn count_logged(&self, text: &str) -> usize {
        self.log().matches(text).count()
    }

    /// Sends SIGKILL and waits for the end; fails if it had ended before.
    pub fn kill9(mut self) -> Result<()> {
        self.child.kill()?;
        let status = self.child.wait()?;
        if status.signal() != Some(Signal::SIGKILL as i32) {
            bail!("the agent had already ended: {status}\n{}", self.log());
        }
        Ok(())
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).with_context(|| format!("kill({signal})"))
    }

    /// Sends SIGTERM and waits for the end.
    pub fn terminate(mut self) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        self.wait(TIMEOUT)
    }

    /// Waits until it ends; fails if it still runs after `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let mut status = None;
        eventually(limit, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        });
        status.with_context(|| format!("the agent still runs after {} s\n{}", limit.as_secs(), self.log()))
    }

    /// Waits until `condition` holds; fails if the agent ends first, or it does not within `limit`, with the whole log.
    pub fn wait_until(&mut self, limit: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
        let mut ended = None;
        let done = eventually(limit, || {
            ended = self.child.try_wait().ok().flatten();
            ended.is_some() || condition()
        });
        if let Some(status) = ended {
            bail!("the agent ended ({status}); its log:\n{}", self.log());
        }
        let limit = limit.as_secs();
        ensure!(done, "the condition does not hold after {limit} s; the agent's log:\n{}", self.log());
        Ok(())
    }

    pub fn wait_for_log(&mut self, limit: Duration, mut condition: impl FnMut(&str) -> bool) -> Result<()> {
        let log = self.log.clone();
        self.wait_until(limit, || condition(&fs::read_to_string(&log).unwrap_or_default()))
    }

    pub fn wait_until_logged(&mut self, limit: Duration, text: &str) -> Result<()> {
        self.wait_for_log(limit, |log| log.contains(text)).with_context(|| format!("{text:?} was not logged"))
    }

    /// Waits until the log reports an active state: the programs are attached by then.
    pub fn wait_until_applied(&mut self, limit: Duration) -> Result<()> {
        self.wait_until_logged(limit, APPLIED)
    }

    pub fn memory_kb(&self, field: &str) -> Result<u64> {
        memory_kb(self.pid(), field)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- the agent's log:\n{}---", self.log());
        }
        // Both fail if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
