//! A backend that answers by the line protocol: a question on its standard input, an answer on its standard output.

use std::{
    ffi::OsString,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use crate::{RunError, brain::NODE, oracle};

/// A running backend; killed when dropped.
pub(crate) struct Backend {
    child: Child,
    questions: ChildStdin,
    answers: Receiver<String>,
}

impl Backend {
    pub(crate) fn start(command: &[OsString], socket: &Path) -> Result<Self, RunError> {
        let program = command.first().cloned().unwrap_or_default();
        let spawned = Command::new(&program)
            .args(&command[1..])
            .env("KUBE_PROXY_EBPF_TARGET", format!("unix://{}", socket.display()))
            .env("NODE_NAME", NODE)
            .env("KUBE_PROXY_EBPF_CLUSTER_CIDRS", oracle::CLUSTER_CIDRS)
            .env("KUBE_PROXY_EBPF_NODE_ADDRESSES", oracle::NODE_ADDRESSES.join(","))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = spawned.map_err(|error| RunError::Spawn { command: program, error })?;
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

    /// The answer to a question, or why there is none.
    pub(crate) fn ask(&mut self, question: &str, timeout: Duration) -> Result<String, String> {
        let sent = writeln!(self.questions, "{question}").and_then(|()| self.questions.flush());
        match sent.map(|()| self.answers.recv_timeout(timeout)) {
            Ok(Ok(answer)) => Ok(answer.trim().to_owned()),
            Ok(Err(RecvTimeoutError::Timeout)) => {
                Err(format!("no answer to `{question}` within {} s", timeout.as_secs()))
            }
            Ok(Err(RecvTimeoutError::Disconnected)) | Err(_) => Err(format!("the backend {}", self.end())),
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

impl Drop for Backend {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
