//! A small API server for tests and benchmarks, over real HTTP and TLS: it has Services, EndpointSlices, Nodes, ServiceCIDRs
//! and Pods, and accepts events.
//!
//! It responds as a Kubernetes API server does, with paged lists, watches with bookmarks, streaming lists, selectors and
//! expiring resource versions, and it injects the faults that a test asks for.

#![forbid(unsafe_code)]

mod objects;
mod selector;
mod serve;
mod state;
mod tls;

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
};

pub use objects::Resource;
pub use state::{Answers, Fault, Settings, Verb, WatchList};

use state::{Rule, Shared};
use tls::Identity;

/// A server; it stops when dropped.
pub struct ApiServer {
    address: SocketAddr,
    identity: Option<Arc<Identity>>,
    shared: Arc<Shared>,
    running: Option<Running>,
}

struct Running {
    thread: JoinHandle<()>,
    /// Makes the thread hang until the other end is dropped; the thread ends when this is.
    hang: mpsc::UnboundedSender<std::sync::mpsc::Receiver<()>>,
    /// Dropped to end the hang.
    hanging: Option<std::sync::mpsc::Sender<()>>,
}

impl ApiServer {
    /// Starts a server on a free port of the loopback address, in the network namespace of the calling thread.
    pub fn start(settings: Settings) -> Result<Self> {
        let identity = settings.is_tls.then(|| Identity::new(settings.has_http2)).transpose()?.map(Arc::new);
        let mut server = Self::without_socket(settings);
        server.identity = identity;
        server.resume()?;
        Ok(server)
    }

    /// A server that does not listen, and serves the connections that it is given, without TLS.
    pub fn without_socket(settings: Settings) -> Self {
        let shared = Arc::new(Shared::new(settings));
        Self { address: (Ipv4Addr::LOCALHOST, 0).into(), identity: None, shared, running: None }
    }

    /// Serves a connection until it ends. Must be polled within a tokio runtime.
    pub fn serve<S>(&self, stream: S) -> impl Future<Output = ()> + Send + use<S>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        serve::connection(stream, Arc::clone(&self.shared))
    }

    /// Stops listening and closes every connection; the state is kept.
    pub fn stop(&mut self) {
        if let Some(Running { thread, hang, hanging }) = self.running.take() {
            drop((hang, hanging));
            // The thread returns nothing.
            let _ = thread.join();
        }
    }

    /// Hangs: connections stay open and the kernel accepts new ones, but nothing is read and nothing answered.
    pub fn hang(&mut self) {
        if let Some(running) = &mut self.running {
            let (go_on, until) = std::sync::mpsc::channel();
            running.hanging = Some(go_on);
            // A thread that has ended answers nothing either.
            let _ = running.hang.send(until);
        }
    }

    /// Ends what [`Self::hang`] began.
    pub fn go_on(&mut self) {
        if let Some(running) = &mut self.running {
            running.hanging = None;
        }
    }

    /// Listens again, at the same address; fails if that is in use.
    pub fn resume(&mut self) -> Result<()> {
        if self.running.is_some() {
            return Ok(());
        }
        let listener = std::net::TcpListener::bind(self.address)
            .with_context(|| format!("cannot listen on {}", self.address))?;
        listener.set_nonblocking(true)?;
        self.address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (hang, mut hangs) = mpsc::unbounded_channel::<std::sync::mpsc::Receiver<()>>();
        let shared = Arc::clone(&self.shared);
        let identity = self.identity.clone();
        let thread = thread::Builder::new().name("api-server".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    result = serve::serve(listener, identity, shared) => {
                        if let Err(error) = result {
                            eprintln!("the API server ended: {error:#}");
                        }
                    }
                    () = async {
                        while let Some(until) = hangs.recv().await {
                            // Blocks the only thread.
                            let _ = until.recv();
                        }
                    } => {}
                }
            });
        })?;
        self.running = Some(Running { thread, hang, hanging: None });
        Ok(())
    }

    pub fn url(&self) -> String {
        let scheme = if self.identity.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// Writes a kubeconfig into a folder, and beside it the CA (by a relative path) and the token (absolute), if there are any.
    pub fn kubeconfig(&self, folder: &Path) -> Result<PathBuf> {
        let url = self.url();
        let mut text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: {{cluster: c, namespace: \
             default, user: u}}\nclusters:\n- name: c\n  cluster:\n    server: {url}\n"
        );
        if let Some(identity) = &self.identity {
            fs::write(folder.join("ca.crt"), &identity.ca)?;
            text += "    certificate-authority: ca.crt\n";
        }
        text += "users:\n- name: u\n  user:\n";
        if let Some(token) = &self.shared.state.lock().settings.token {
            let path = folder.join("token");
            fs::write(&path, token)?;
            text += &format!("    tokenFile: {}\n", path.display());
        } else {
            text += "    {}\n";
        }
        let path = folder.join("kubeconfig");
        fs::write(&path, text)?;
        Ok(path)
    }

    /// Adds an object, or replaces the one of the same name. Panics if its kind is unknown, or it has no name.
    pub fn set(&self, object: Value) {
        let version = self.shared.state.lock().objects.set(object);
        self.shared.version.send_replace(version);
    }

    /// Deletes an object; `name` is `namespace/name`, or `name` for a Node and a ServiceCIDR.
    pub fn delete(&self, resource: Resource, name: &str) {
        let version = self.shared.state.lock().objects.delete(resource, name);
        self.shared.version.send_replace(version);
    }

    /// The newest resource version.
    pub fn version(&self) -> u64 {
        *self.shared.version.borrow()
    }

    /// Compacts the history: watches from earlier versions expire and must list again.
    pub fn compact(&self) {
        self.shared.state.lock().objects.compact();
    }

    /// Restores a backup of this version, as it was then; versions count on from there.
    pub fn restore(&self, version: u64) {
        self.shared.state.lock().objects.restore(version);
        self.shared.version.send_replace(version);
    }

    pub fn configure(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.shared.state.lock().settings);
    }

    /// Applies a fault to the next `times` requests for a resource with a verb.
    pub fn inject_fault(&self, resource: Resource, verb: Verb, times: usize, fault: Fault) {
        self.shared.state.lock().rules.push(Rule { resource, verb, times, fault });
    }

    pub fn clear_faults(&self) {
        self.shared.state.lock().rules.clear();
    }

    /// Closes all connections, even within a response.
    pub fn disconnect_all(&self) {
        self.shared.disconnects.send_modify(|it| *it += 1);
    }

    /// The events posted so far.
    pub fn events(&self) -> Vec<Value> {
        self.shared.state.lock().events.clone()
    }

    /// The number of bytes of bodies that it has sent so far.
    pub fn sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }

    /// The requests since the last call, as `/path?query`.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.state.lock().requests)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop();
    }
}
