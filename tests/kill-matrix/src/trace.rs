//! Runs a program under ptrace(2), and intervenes at one of its steps.
//!
//! The tracer is a process of its own, so that it can be started in place of the program; it and the program end together. Which
//! step is interrupted is in the order file, which may be replaced while the program runs.

use std::{
    fs::{self, OpenOptions},
    io::{ErrorKind, Write as _},
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use nix::{
    errno::Errno,
    libc,
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

use crate::step::stop_at_calls;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Intervention {
    /// The process is killed before the system call.
    Kill,
    /// The system call is not made and returns the error of this number.
    Fail(i32),
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Interruption {
    /// The step, from 1.
    pub(crate) step: usize,
    pub(crate) intervention: Intervention,
}

/// The content of the order file. Steps are counted from 1 for each order.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    /// Distinguishes orders that are equal otherwise.
    pub(crate) number: usize,
    pub(crate) interruption: Option<Interruption>,
}

/// A program to trace, and the files about its steps.
#[derive(Args, Debug)]
pub(crate) struct Trace {
    /// The order file; without it, steps do not count
    #[arg(long)]
    pub(crate) order: PathBuf,
    /// Where the steps that count are written, one per line
    #[arg(long)]
    pub(crate) steps: PathBuf,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<String>,
}

/// What the registers of a thread say at a stop.
#[cfg(target_arch = "x86_64")]
mod registers {
    use nix::{libc::user_regs_struct, sys::ptrace, unistd::Pid};

    use crate::step::Call;

    pub(super) type Registers = user_regs_struct;

    pub(super) fn call(thread: Pid) -> nix::Result<(Call, Registers)> {
        let it = ptrace::getregs(thread)?;
        let arguments = [it.rdi, it.rsi, it.rdx, it.r10];
        Ok((Call { thread, number: it.orig_rax, arguments }, it))
    }

    /// Makes the thread go on as if its call had returned an error.
    pub(super) fn fail_call(thread: Pid, mut registers: Registers, errno: i32) -> nix::Result<()> {
        // There is no such call: none is made, and the result stays.
        registers.orig_rax = u64::MAX;
        registers.rax = i64::from(-errno).cast_unsigned();
        ptrace::setregs(thread, registers)
    }
}

/// Other machines have other registers; `main` refuses to begin there.
#[cfg(not(target_arch = "x86_64"))]
mod registers {
    use nix::{errno::Errno, unistd::Pid};

    use crate::step::Call;

    pub(super) type Registers = ();

    pub(super) fn call(_: Pid) -> nix::Result<(Call, Registers)> {
        Err(Errno::ENOSYS)
    }

    pub(super) fn fail_call(_: Pid, (): Registers, _: i32) -> nix::Result<()> {
        Err(Errno::ENOSYS)
    }
}

/// The order that is followed, and how many steps were made since.
#[derive(Default)]
struct Followed {
    text: String,
    interruption: Option<Interruption>,
    count: usize,
}

impl Trace {
    /// Runs the program to its end; its exit code, or 137 if it was killed.
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let program = self.start()?;
        let mut followed = Followed::default();
        let mut outcome = None;
        loop {
            let stopped = match (waitpid(None, Some(WaitPidFlag::__WALL)), outcome) {
                (Err(Errno::ECHILD), Some(code)) => return Ok(ExitCode::from(code)),
                (stopped, _) => stopped.context("waitpid")?,
            };
            if let (Some(_), Some(thread)) = (outcome, stopped.pid()) {
                // A child of the program has what it inherited, the lock among it; it may have ended.
                let _ = kill(thread, Signal::SIGKILL);
                continue;
            }
            let (thread, signal) = match stopped {
                WaitStatus::Exited(process, code) if process == program => {
                    outcome = Some(u8::try_from(code).unwrap_or(u8::MAX));
                    continue;
                }
                WaitStatus::Signaled(process, ..) if process == program => {
                    outcome = Some(137);
                    continue;
                }
                WaitStatus::PtraceEvent(thread, _, libc::PTRACE_EVENT_SECCOMP) => {
                    match self.at_call(thread, &mut followed) {
                        Ok(()) => (thread, None),
                        // A thread that is killed meanwhile cannot be asked.
                        Err(error) if error.downcast_ref() == Some(&Errno::ESRCH) => (thread, None),
                        Err(error) => return Err(error.context(format!("cannot trace thread {thread}"))),
                    }
                }
                // A new thread begins with SIGSTOP, and a new program with SIGTRAP; neither is for the program.
                WaitStatus::Stopped(thread, Signal::SIGTRAP | Signal::SIGSTOP)
                | WaitStatus::PtraceEvent(thread, ..) => (thread, None),
                WaitStatus::Stopped(thread, signal) => (thread, Some(signal)),
                _ => continue,
            };
            match ptrace::cont(thread, signal) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => bail!("cannot continue thread {thread}: {error}"),
            }
        }
    }

    /// Starts the program, stopped.
    fn start(&self) -> Result<Pid> {
        let mut command = Command::new(std::env::current_exe()?);
        let child = command.arg("traced").arg("--").args(&self.command).spawn()?;
        let program = Pid::from_raw(child.id().cast_signed());
        let stopped = waitpid(program, None)?;
        ensure!(matches!(stopped, WaitStatus::Stopped(..)), "{:?} does not start: {stopped:?}", self.command);
        let options = Options::PTRACE_O_TRACESECCOMP
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK
            | Options::PTRACE_O_EXITKILL;
        ptrace::setoptions(program, options)?;
        ptrace::cont(program, None)?;
        Ok(program)
    }

    /// Does what is to be done at a system call that a thread is about to make.
    fn at_call(&self, thread: Pid, followed: &mut Followed) -> Result<()> {
        let (call, registers) = registers::call(thread)?;
        let Some(step) = call.step() else { return Ok(()) };
        match self.at_step(&step, followed)? {
            None => {}
            Some(Intervention::Kill) => kill(thread, Signal::SIGKILL)?,
            Some(Intervention::Fail(errno)) => registers::fail_call(thread, registers, errno)?,
        }
        Ok(())
    }

    /// Counts and lists a step, and says what is to be done there.
    fn at_step(&self, step: &str, followed: &mut Followed) -> Result<Option<Intervention>> {
        let text = match fs::read_to_string(&self.order) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.context("the order file")?,
        };
        if text != followed.text {
            let Order { interruption, .. } = serde_json::from_str(&text).context("the order file")?;
            *followed = Followed { text, interruption, count: 0 };
        }
        let steps = OpenOptions::new().create(true).append(true).open(&self.steps);
        writeln!(steps.context("the file of the steps")?, "{step}")?;
        followed.count += 1;
        Ok(followed.interruption.filter(|it| it.step == followed.count).map(|it| it.intervention))
    }
}

/// Becomes a program that the parent process traces.
pub(crate) fn become_traced(command: &[String]) -> Result<ExitCode> {
    let [program, arguments @ ..] = command else { bail!("no program") };
    ptrace::traceme()?;
    stop_at_calls()?;
    Err(Command::new(program).args(arguments).exec()).with_context(|| format!("cannot start {program}"))
}
