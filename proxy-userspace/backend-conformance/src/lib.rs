//! Plays scenarios to a backend, as its brain, and asks it where connections go.
//!
//! Invariant: what is asked is decided by docs/contract.md alone.
//! The expected answers are computed from the state that was published, not from what was sent.

#![forbid(unsafe_code)]

mod backend;
mod brain;
mod cases;
mod generate;
mod harness;
mod lines;
mod oracle;
mod packets;
mod report;
mod skips;
mod wait;

use std::{ffi::OsString, io, path::PathBuf, time::Duration};

pub use brain::NODE;
pub use cases::{names, run};
pub use oracle::CLUSTER_CIDRS;
pub use report::{CaseResult, Outcome, Report};
pub use skips::{Skips, SkipsError};

#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The backend's command and its arguments.
    pub command: Vec<OsString>,
    pub interface: Interface,
    /// The log file of a backend that is asked by packets.
    pub log: Option<PathBuf>,
    /// The time limit for the backend to apply a state, a reconnect included, and to answer.
    pub timeout: Duration,
    /// Only cases whose names contain this.
    pub filter: Option<String>,
    /// Skipped cases and features.
    pub skips: Skips,
    /// Whether to go on after 10 cases in a row have failed.
    pub keep_going: bool,
}

/// The interface by which a backend is asked where connections go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Interface {
    /// By questions on its standard input.
    Lines,
    /// By packets that its node receives, in a network of their own.
    Packets,
    /// By packets, and for pods by sockets of this process, which enters a cgroup.
    Sockets {
        /// The cgroup, which is made.
        cgroup: PathBuf,
    },
    /// By packets, if the backend listens at the addresses of Services.
    Listeners,
}

/// Why the cases cannot be run at all.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("the brain for the backend cannot listen: {0}")]
    Listen(#[from] grpc_server::ListenError),
    #[error("cannot start a runtime: {0}")]
    Runtime(#[source] io::Error),
    #[error("cannot make a network for the backend: {0}; it needs root, and `ip`")]
    Network(#[source] io::Error),
    #[error("cannot start {command:?}: {error}; name a program on the PATH, or its path")]
    Spawn {
        /// The name of the program.
        command: OsString,
        #[source]
        error: io::Error,
    },
    /// No case is left.
    #[error("no case has {0:?} in its name; --list prints them")]
    NoCase(String),
}
