//! The settings of a server, the faults of its responses, and the state that its connections share.
//!
//! A fault applies to requests for one resource with one verb, a given number of times, and to no other request.

use std::{sync::atomic::AtomicU64, time::Duration};

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::watch;

use crate::objects::{Objects, Resource};

#[derive(Clone, Debug)]
pub struct Settings {
    /// Whether it serves TLS, with a CA of its own.
    pub is_tls: bool,
    /// The bearer token that it requires.
    pub token: Option<String>,
    /// Whether it offers HTTP/2, with TLS.
    pub has_http2: bool,
    pub watch_list: WatchList,
    /// Whether it answers lists of any version from a cache, which has no pages.
    pub has_cache: bool,
    /// How many changes a list lacks that need not be newest, as that of a server whose cache is behind.
    pub list_lag: u64,
    /// Whether it supports the field selector `spec.clusterIP`; without it, it rejects it as Kubernetes 1.30 does.
    pub has_field_selectors: bool,
    pub accepts_events: bool,
    /// Whether it answers requests; open watches go on.
    pub answers: Answers,
    pub bookmark_interval: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    All,
    /// With `503 Service Unavailable`, as a load balancer without a server does.
    Unavailable,
    None,
}

/// What a server does with a watch that is to begin with a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchList {
    /// It sends all objects, and marks their end.
    Supported,
    /// It rejects the request, as Kubernetes 1.30 does.
    Rejected,
    /// It sends all objects, and never marks their end, as servers before Kubernetes 1.27 do.
    Ignored,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            is_tls: false,
            token: None,
            has_http2: true,
            watch_list: WatchList::Supported,
            has_cache: true,
            list_lag: 0,
            has_field_selectors: true,
            accepts_events: true,
            answers: Answers::All,
            bookmark_interval: Duration::from_secs(1),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A page of a list.
    List,
    /// A watch, including one that begins with a list.
    Watch,
    /// A list of one object, of which the resource version alone is used.
    Version,
}

#[derive(Clone, Debug)]
pub enum Fault {
    /// A status other than 200.
    Status {
        code: u16,
        /// The message of the `Status` object.
        message: String,
        /// The header Retry-After, in seconds.
        retry_after: Option<u64>,
    },
    /// A watch whose first event is an ERROR.
    ErrorEvent {
        /// The code of the `Status` object.
        code: u16,
        message: String,
    },
    NoResponse,
    /// The connection is closed after this many bytes of the body.
    DisconnectAfter(usize),
    /// The body is sent in fragments of this many bytes.
    Fragments(usize),
}

#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) resource: Resource,
    pub(crate) verb: Verb,
    pub(crate) times: usize,
    pub(crate) fault: Fault,
}

#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<State>,
    /// The newest resource version.
    pub(crate) version: watch::Sender<u64>,
    /// How often all connections have been closed.
    pub(crate) disconnects: watch::Sender<u64>,
    pub(crate) sent: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) settings: Settings,
    pub(crate) objects: Objects,
    pub(crate) rules: Vec<Rule>,
    pub(crate) requests: Vec<String>,
    pub(crate) events: Vec<Value>,
}

impl Shared {
    pub(crate) fn new(settings: Settings) -> Self {
        Self { state: Mutex::new(State { settings, ..State::default() }), ..Self::default() }
    }
}

impl State {
    /// Takes the fault that applies to a request, if there is one.
    pub(crate) fn take_fault(&mut self, resource: Resource, verb: Verb) -> Option<Fault> {
        let is_next = |it: &&mut Rule| it.resource == resource && it.verb == verb && it.times > 0;
        let rule = self.rules.iter_mut().find(is_next)?;
        rule.times -= 1;
        Some(rule.fault.clone())
    }
}
