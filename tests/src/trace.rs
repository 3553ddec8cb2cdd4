//! What `trace` reports.

use std::{
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
};

use serde_json::Value;

use crate::{TIMEOUT, agent, eventually, http};

/// `trace --output json`, until it is dropped.
#[derive(Debug)]
pub struct Trace {
    child: Child,
    lines: Receiver<Value>,
    /// The socket of the process that serves the trace.
    socket: PathBuf,
}

impl Trace {
    /// Starts a command `trace` with its filters, and waits until it reports.
    #[must_use]
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        let socket = command.get_envs().find(|(name, _)| *name == agent::STATUS_SOCKET);
        let socket = socket.and_then(|(_, path)| path).expect("the command names a socket").into();
        let mut child = spawn(command.args(["--output", "json"]).stdout(Stdio::piped()));
        let stdout = child.stdout.take().expect("a pipe");
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, lines, socket }
    }

    #[track_caller]
    pub fn next(&self) -> Value {
        self.lines.recv_timeout(TIMEOUT).expect("another line comes")
    }

    /// The next line, whose fields have these values.
    #[track_caller]
    pub fn expect(&self, fields: &[(&str, &str)]) -> Value {
        let line = self.next();
        assert_fields(&line, fields);
        line
    }

    /// The lines before that of a connect to this address.
    #[track_caller]
    pub fn until(&self, destination: SocketAddr) -> Vec<Value> {
        let mut lines = Vec::new();
        loop {
            match self.next() {
                line if line["destination"] == destination.to_string() => return lines,
                line => lines.push(line),
            }
        }
    }

    /// Kills it, and waits until another trace may begin.
    #[track_caller]
    pub fn kill(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let ended = eventually(TIMEOUT, || !self.is_served());
        assert!(ended || thread::panicking(), "the trace has not ended");
    }

    fn is_served(&self) -> bool {
        let status = http::get_from_socket(&self.socket, "/status");
        let status = status.ok().and_then(|it| serde_json::from_str::<Value>(&it.body).ok());
        status.is_some_and(|it| !it["trace"].is_null())
    }
}

/// Starts a command `trace`, and waits until it reports.
#[track_caller]
pub fn spawn(command: &mut Command) -> Child {
    let mut child = command.stderr(Stdio::piped()).spawn().expect("the command starts");
    let mut first = String::new();
    let stderr = child.stderr.take().expect("a pipe");
    BufReader::new(stderr).read_line(&mut first).expect("a line");
    assert_eq!(first, "tracing\n");
    child
}

#[track_caller]
pub fn assert_fields(line: &Value, fields: &[(&str, &str)]) {
    for (field, value) in fields {
        assert_eq!(line[field], *value, "{field} of {line}");
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.kill();
    }
}
