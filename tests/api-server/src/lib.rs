//! A small API server of Services, EndpointSlices and Nodes, which takes events; over real HTTP and TLS, for tests and
//! measurements.
//!
//! The one rule: it answers as a Kubernetes API server does, and fails when and how it is told to.
//! Lists with pages, watches with bookmarks, streaming lists, selectors, versions that expire; and all that goes wrong.

#![forbid(unsafe_code)]

mod faults;
mod objects;
mod select;
mod serve;
mod tls;

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde_json::Value;
use tokio::sync::{oneshot, watch};

pub use faults::{Fault, Verb};
pub use objects::Resource;

use faults::Rule;
use objects::Objects;
use tls::Identity;

/// What kind of a server it is.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Whether it speaks TLS, with a CA of its own.
    pub is_tls: bool,
    /// The bearer token that it wants.
    pub token: Option<String>,
    /// Whether it can begin a watch with a list; without it, it refuses that as Kubernetes 1.30 does.
    pub has_watch_list: bool,
    /// Whether it selects by `spec.clusterIP`; without it, it refuses that as Kubernetes 1.30 does.
    pub has_field_selectors: bool,
    /// Whether events may be posted.
    pub accepts_events: bool,
    /// How often a watch is sent a bookmark.
    pub bookmark_interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            is_tls: false,
            token: None,
            has_watch_list: true,
            has_field_selectors: true,
            accepts_events: true,
            bookmark_interval: Duration::from_secs(1),
        }
    }
}

/// A server; it ends when it is dropped.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    identity: Option<Arc<Identity>>,
    shared: Arc<Shared>,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

/// What the server knows, and how it is to behave.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// The newest version.
    version: watch::Sender<u64>,
    /// Counts how often all connections have been cut.
    cuts: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    settings: Settings,
    objects: Objects,
    rules: Vec<Rule>,
    requests: Vec<String>,
    events: Vec<Value>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ApiServer {
    /// Starts a server on a free port of the loopback address, in the network namespace of the calling thread.
    ///
    /// # Errors
    ///
    /// If there is no port, or no certificate can be made.
    pub fn start(settings: Settings) -> Result<Self> {
        let identity = settings.is_tls.then(Identity::new).transpose()?.map(Arc::new);
        let state = State {
            settings,
            objects: Objects::default(),
            rules: Vec::new(),
            requests: Vec::new(),
            events: Vec::new(),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            version: watch::Sender::new(0),
            cuts: watch::Sender::new(0),
        });
        let mut server = Self { address: (Ipv4Addr::LOCALHOST, 0).into(), identity, shared, running: None };
        server.resume()?;
        Ok(server)
    }

    /// Goes away: nobody listens any more, and every connection is closed. What it knows stays.
    pub fn stop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            // It has nothing to say.
            let _ = thread.join();
        }
    }

    /// Comes back, at the same address.
    ///
    /// # Errors
    ///
    /// If the port has been taken meanwhile.
    pub fn resume(&mut self) -> Result<()> {
        if self.running.is_some() {
            return Ok(());
        }
        let listener = std::net::TcpListener::bind(self.address)
            .with_context(|| format!("cannot listen on {}", self.address))?;
        listener.set_nonblocking(true)?;
        self.address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let shared = Arc::clone(&self.shared);
        let identity = self.identity.clone();
        let thread = thread::Builder::new().name("api-server".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    result = serve::serve(listener, identity, shared) => {
                        if let Err(error) = result {
                            eprintln!("the API server has ended: {error:#}");
                        }
                    }
                    _ = stopped => {}
                }
            });
        })?;
        self.running = Some((stop, thread));
        Ok(())
    }

    /// Where it is.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.identity.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// Writes a kubeconfig for it into a folder; with TLS its CA too, with a token that as a file.
    ///
    /// # Errors
    ///
    /// If the folder cannot be written to.
    pub fn kubeconfig(&self, folder: &Path) -> Result<PathBuf> {
        let url = self.url();
        let mut text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: {{cluster: c, user: \
             u}}\nclusters:\n- name: c\n  cluster:\n    server: {url}\n"
        );
        if let Some(identity) = &self.identity {
            fs::write(folder.join("ca.crt"), &identity.ca)?;
            text += "    certificate-authority: ca.crt\n";
        }
        text += "users:\n- name: u\n  user:\n";
        if let Some(token) = &self.shared.state().settings.token {
            fs::write(folder.join("token"), token)?;
            text += "    tokenFile: token\n";
        } else {
            text += "    {}\n";
        }
        let path = folder.join("kubeconfig");
        fs::write(&path, text)?;
        Ok(path)
    }

    /// Adds an object, or puts it in the place of the one of the same name.
    ///
    /// # Panics
    ///
    /// If it is none of the three kinds, or has no name.
    pub fn set(&self, object: Value) {
        let version = self.shared.state().objects.set(object);
        self.shared.version.send_replace(version);
    }

    /// Takes an object away; `name` is `namespace/name`, or the name alone of a Node.
    pub fn delete(&self, resource: Resource, name: &str) {
        let version = self.shared.state().objects.delete(resource, name);
        self.shared.version.send_replace(version);
    }

    /// Forgets the history: whoever watches from before now is told to list again.
    pub fn compact(&self) {
        self.shared.state().objects.compact();
    }

    /// Changes what kind of a server it is.
    pub fn configure(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.shared.state().settings);
    }

    /// From now on, treats the next requests of a kind so; `times` of them.
    pub fn inject_fault(&self, resource: Resource, verb: Verb, times: usize, fault: Fault) {
        self.shared.state().rules.push(Rule { resource, verb, times, fault });
    }

    /// Ends all troubles.
    pub fn clear_faults(&self) {
        self.shared.state().rules.clear();
    }

    /// Cuts all connections, in the middle of whatever they are at.
    pub fn disconnect_all(&self) {
        self.shared.cuts.send_modify(|it| *it += 1);
    }

    /// The events that were posted so far.
    #[must_use]
    pub fn events(&self) -> Vec<Value> {
        self.shared.state().events.clone()
    }

    /// The requests so far, as `/path?query`, and forgets them.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.state().requests)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop();
    }
}
