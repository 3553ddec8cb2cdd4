//! The client library: follows what a brain computes for one node.
//!
//! | view | for a backend that | start with |
//! |---|---|---|
//! | full state | rewrites everything on each change | [`Client::watch`] |
//! | differences | keeps a large state in a form of its own | [`Client::changes`] |
//! | difference of two computed states | needs to know what to add, change and delete | [`DiffStore`](crate::DiffStore) |
//! | differences of the cluster state | is a brain itself | [`Client::cluster`] |
//!
//! A complete backend that prints:
//!
//! ```no_run
//! # async fn example() -> Result<(), proxy_contract::TargetError> {
//! use proxy_contract::client::Client;
//!
//! let mut states = Client::new("unix:///run/kube-proxy-ebpf/proxy.sock".parse()?, "node-1").watch();
//! loop {
//!     let state = states.next().await;
//!     for (name, it) in &state.services {
//!         println!("{name}: {} endpoints", it.endpoints.len());
//!     }
//! }
//! # }
//! ```
//!
//! Invariant: an outage is not an error and changes nothing downstream.
//! Failures are logged with `tracing`, and the library reconnects with exponential back-off and jitter, waiting at most 10 s;
//! meanwhile the last state stays active. If the state is unchanged after a reconnect, it is not returned again.
//! Install a subscriber, such as `tracing_subscriber::fmt().with_writer(std::io::stderr).init()`: without one, a wrong
//! address causes no output at all.
//!
//! With the feature `clap`, `Flags` are the flags of a backend.
//!
//! Everything runs in the caller's task, on a tokio runtime with time and IO enabled; only the connection has tasks of its
//! own. Each `next` is cancel safe.

mod backoff;
mod cluster;
mod connect;
mod explain;
#[cfg(feature = "clap")]
mod flags;
#[cfg(feature = "_fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod inventory;
mod node_view;
mod nodes;
mod session;
mod state;
mod tracker;
mod view;
mod watch;

use std::{io, sync::Arc};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::transport::Uri;
use tower::service_fn;

use self::connect::{ByteStream, Connector};
use crate::{
    Targets,
    globalv1::NodeStatus,
    localv1::{Explanation, Extension},
};

#[cfg(feature = "clap")]
pub use self::flags::{Flags, FlagsError};
pub use self::{
    cluster::ClusterWatch,
    connect::Client,
    explain::ExplainError,
    session::Refused,
    state::{
        Change, Cluster, ClusterChange, ClusterService, NodeChange, ServiceEndpoints, Snapshot, State,
        WithEndpoints,
    },
    watch::{ChangeWatch, Watch},
};

impl Client {
    /// A client of the brain at `targets`, for the state of the node `node_name`, or of the brain's own node if that is
    /// empty. Does not connect yet.
    ///
    /// If there are several addresses, given or of a host's name, it follows one brain at a time, a random one that serves;
    /// when it loses that one, it goes to another.
    pub fn new(targets: Targets, node_name: impl Into<String>) -> Self {
        Self {
            targets,
            node: node_name.into(),
            extensions: vec![Extension::Revisions],
            outage: tokio::sync::watch::Sender::new(None),
            connect_by: None,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Requests extensions of KPNG's API, in addition to revisions; [`State::extensions`] has those that the brain sends.
    ///
    /// ```
    /// # use proxy_contract::{client::Client, localv1::Extension};
    /// # let client = Client::new("unix:///run/proxy.sock".parse()?, "node-1");
    /// let client = client.request_extensions([Extension::Nodes, Extension::Heartbeats, Extension::Resume]);
    /// # Ok::<_, proxy_contract::TargetError>(())
    /// ```
    #[must_use]
    pub fn request_extensions(mut self, extensions: impl IntoIterator<Item = Extension>) -> Self {
        for it in extensions {
            if !self.extensions.contains(&it) {
                self.extensions.push(it);
            }
        }
        self
    }

    /// Connects by `connect` and not by a socket of its own: through a tunnel, or in memory. The first target is what the log
    /// says, and the name that a brain's certificate must have.
    ///
    /// ```
    /// # use proxy_contract::client::Client;
    /// # async fn example() -> std::io::Result<()> {
    /// let client = Client::new("unix:///in-memory".parse().unwrap(), "node-1").connect_by(|| async {
    ///     let (ours, _theirs) = tokio::io::duplex(4096);
    ///     Ok(ours)
    /// });
    /// # drop(client);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn connect_by<F, S>(mut self, connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let connect = Arc::new(connect);
        self.connect_by = Some(Connector::new(service_fn(move |_: Uri| {
            let connecting = connect();
            async { connecting.await.map(|it| TokioIo::new(Box::new(it) as Box<dyn ByteStream>)) }
        })));
        self
    }

    /// Uses mutual TLS for TCP targets; unix sockets need none.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self, tls: crate::tls::ClientTls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// The addresses of the brains.
    pub fn targets(&self) -> &Targets {
        &self.targets
    }

    /// The name of the node; empty for the brain's own node.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Why the brain cannot be followed now; `None` while it can be, and before the first attempt has failed. Each state and each
    /// heartbeat notifies the receiver, too.
    ///
    /// ```
    /// # use proxy_contract::client::Client;
    /// # let client = Client::new("unix:///run/proxy.sock".parse()?, "node-1");
    /// let is_healthy = client.outage().borrow().is_none();
    /// # assert!(is_healthy);
    /// # Ok::<_, proxy_contract::TargetError>(())
    /// ```
    pub fn outage(&self) -> tokio::sync::watch::Receiver<Option<String>> {
        self.outage.subscribe()
    }

    /// Follows the full state, over a stream that carries only changes (`localv1.Sets/Watch`, as in KPNG).
    pub fn watch(&self) -> Watch {
        Watch::new(self)
    }

    /// Follows the differences between states, over the same kind of stream. A backend that has a function per object calls it
    /// for each entry, where `None` is a deletion; a [`DiffStore`](crate::DiffStore) says which endpoints of a Service differ.
    pub fn changes(&self) -> ChangeWatch {
        ChangeWatch::new(self)
    }

    /// Follows the changes of the whole cluster (`globalv1.Sets/Watch`, as in KPNG), for a brain that follows another brain.
    pub fn cluster(&self) -> ClusterWatch {
        ClusterWatch::new(self)
    }

    /// The clients that follow the brains, and what they have acknowledged (`globalv1.Nodes/List`); if `address` is given, also
    /// whether it is that of an endpoint there. A brain among others that does not answer is left out, and logged.
    ///
    /// # Errors
    ///
    /// No brain can be reached, or none permits it, or all are older ones.
    ///
    /// ```no_run
    /// # async fn example(client: proxy_contract::client::Client) -> Result<(), proxy_contract::client::Refused> {
    /// for node in client.nodes(None).await? {
    ///     println!("{} is behind for {:?} ms", node.name, node.behind_ms);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn nodes(&self, address: Option<std::net::IpAddr>) -> Result<Vec<NodeStatus>, Refused> {
        nodes::list(self, &address.map(|it| it.to_string()).unwrap_or_default()).await
    }

    /// Asks the brain where a connection from the node goes, and why (`localv1.Explanations/Explain`); the words of the
    /// question are in [`ExplainReq`](crate::localv1::ExplainReq).
    ///
    /// # Errors
    ///
    /// The question has no answer, or the brain gives none.
    ///
    /// ```no_run
    /// # async fn example(client: proxy_contract::client::Client) -> Result<(), proxy_contract::client::ExplainError> {
    /// let explanation = client.explain(&["node".into(), "10.96.0.1:443".into()]).await?;
    /// println!("{}", explanation.reason);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn explain(&self, question: &[String]) -> Result<Explanation, ExplainError> {
        explain::ask(self, question).await
    }
}
