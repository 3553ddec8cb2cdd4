//! A backend that answers by the line protocol: a question on its standard input, an answer on its standard output.

use std::{
    ffi::OsString,
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use crate::{
    RunError,
    backend::Backend,
    brain::NODE,
    oracle::{self, Answer, Lookup},
};

/// A running backend; killed when dropped.
pub(crate) struct LineBackend {
    child: Child,
    questions: ChildStdin,
    answers: Receiver<String>,
    timeout: Duration,
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

/// Why a command cannot be started.
pub(crate) fn spawn_error(command: &Command, error: io::Error) -> RunError {
    RunError::Spawn { command: command.get_program().to_owned(), error }
}

impl LineBackend {
    pub(crate) fn start(command: Command, timeout: Duration) -> Result<Self, RunError> {
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
        Ok(Self { child, questions, answers, timeout })
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
    fn ask(&mut self, lookup: &Lookup, _: &Answer) -> Result<String, String> {
        let sent = writeln!(self.questions, "{lookup}").and_then(|()| self.questions.flush());
        match sent.map(|()| self.answers.recv_timeout(self.timeout)) {
            Ok(Ok(answer)) => Ok(answer.trim().to_owned()),
            Ok(Err(RecvTimeoutError::Timeout)) => {
                Err(format!("no answer to `{lookup}` within {} s", self.timeout.as_secs()))
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
