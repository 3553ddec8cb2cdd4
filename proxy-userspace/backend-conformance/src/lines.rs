//! A backend that answers by the line protocol: a question on its standard input, an answer on its standard output.

use std::{
    ffi::OsString,
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use crate::{
    RunError,
    backend::Backend,
    brain::NODE,
    oracle::{self, Answer, Lookup},
    wait::Wait,
};

/// The interval at which a wait for an answer is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A running backend; killed when dropped.
pub(crate) struct LineBackend {
    child: Child,
    questions: ChildStdin,
    answers: Receiver<String>,
}

/// The command of a backend, with the variables that name its brain and its node.
pub(crate) fn command(command: &[OsString], socket: &Path) -> Command {
    let mut backend = Command::new(command.first().cloned().unwrap_or_default());
    backend
        .args(command.iter().skip(1))
        .env("KUBE_PROXY_EBPF_TARGET", format!("unix://{}", socket.display()))
        .env("NODE_NAME", NODE)
        .env("KUBE_PROXY_EBPF_CLUSTER_CIDRS", oracle::CLUSTER_CIDRS)
        .env("KUBE_PROXY_EBPF_NODE_ADDRESSES", oracle::NODE_ADDRESSES.join(","));
    backend
}

pub(crate) fn spawn_error(command: &Command, error: io::Error) -> RunError {
    RunError::Spawn { command: command.get_program().to_owned(), error }
}

impl LineBackend {
    pub(crate) fn start(command: Command) -> Result<Self, RunError> {
        let mut command = command;
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| spawn_error(&command, error))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let questions = stdin.expect("it is piped");
        let (sender, answers) = mpsc::channel();
        let stdout = BufReader::new(stdout.expect("it is piped"));
        // Ends with the backend's output.
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, questions, answers })
    }

    /// The next answer, within the time limit.
    fn receive(&self, wait: &mut Wait<'_>) -> Result<String, RecvTimeoutError> {
        let begin = Instant::now();
        loop {
            match self.answers.recv_timeout(CHECK_INTERVAL) {
                Err(RecvTimeoutError::Timeout) if !wait.is_over(begin) => {}
                received => return received,
            }
        }
    }

    fn end(&mut self) -> String {
        // Its output is closed, so it has ended or is about to.
        let _ = self.child.kill();
        match self.child.wait() {
            Ok(status) => format!("ended: {status}"),
            Err(error) => format!("cannot be waited for: {error}"),
        }
    }
}

impl Backend for LineBackend {
    fn ask(&mut self, lookup: &Lookup, expected: &Answer, wait: &mut Wait<'_>) -> Result<String, String> {
        let sent = writeln!(self.questions, "{lookup}").and_then(|()| self.questions.flush());
        match sent.map(|()| self.receive(wait)) {
            Ok(Ok(answer)) => Ok(answer.trim().to_owned()),
            Ok(Err(RecvTimeoutError::Timeout)) => {
                Err(format!("no answer to `{lookup}` within {} s, expected {expected}", wait.seconds()))
            }
            Ok(Err(RecvTimeoutError::Disconnected)) | Err(_) => Err(format!("the backend {}", self.end())),
        }
    }
}

impl Drop for LineBackend {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
