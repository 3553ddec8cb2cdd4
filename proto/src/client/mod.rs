//! The client library: what a brain says about one node, in the form that a backend likes best.
//!
//! | view | for a backend that | begin at |
//! |---|---|---|
//! | the full state | writes all it has to, each time | [`Client::watch`] |
//! | incremental calls | keeps a structure of its own and changes it | [`Client::run`] |
//! | one change at a time | keeps the state in a form of its own, and is large | [`Client::changes`] |
//! | the difference of two states | wants to know what to add, to change and to take away | [`DiffStore`](crate::DiffStore) |
//! | one state at a time | asks now and then, and remembers what it has | [`Client::poll`] |
//! | the facts of the cluster | is a brain itself | [`Client::cluster`] |
//!
//! A backend that prints, whole:
//!
//! ```no_run
//! # async fn example() -> Result<(), proxy_contract::TargetError> {
//! use proxy_contract::client::Client;
//!
//! let mut states = Client::new("unix:///run/kube-proxy-ebpf/proxy.sock".parse()?, "node-1").watch();
//! while let Some(state) = states.next().await {
//!     for (name, it) in &state.services {
//!         println!("{name}: {} endpoints", it.endpoints.len());
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The one rule: an outage is not the end, and changes nothing downstream.
//! Whatever happens to the brain or the connection is logged (with `tracing`) and tried again, with a pause that grows
//! to ten seconds and is never twice the same; meanwhile the last state stays what it was.
//! A state that comes again after that is not handed out again.
//! So a program needs a subscriber, as `tracing_subscriber::fmt().with_writer(std::io::stderr).init()` in its first line:
//! without one, nobody hears that there is no brain at an address.
//!
//! Everything runs where it is awaited, on a tokio runtime with time and IO enabled. Nothing is spawned but the
//! connection itself, and every `next` can be dropped while it waits without losing anything.

mod backoff;
mod changes;
mod cluster;
mod full;
mod incremental;
mod local;
mod poll;
mod session;

use std::{convert::Infallible, error::Error, time::Duration};

use tonic::transport::{Channel, Endpoint};

use crate::{Target, localnetv1::NextFilter, localv1::Extension};

pub use self::{
    changes::{ChangeWatch, NodeChange},
    cluster::{Cluster, ClusterService, ClusterWatch},
    full::{ServiceEndpoints, State, Watch},
    incremental::{Incremental, ResetFilter},
    poll::Poll,
    session::Refused,
};

/// How long a connection may take, and then the first answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// The longest message that is accepted: that of a Service.
const LONGEST_MESSAGE: usize = 64 << 20;

/// A brain and a node: whom to ask, and for what.
#[derive(Clone, Debug)]
pub struct Client {
    target: Target,
    node: String,
    requested: Vec<Extension>,
    #[cfg(feature = "tls")]
    tls: Option<crate::tls::ClientTls>,
}

impl Client {
    /// A client of the brain at `target`, for the state of the node `node_name`; if that is empty, of the brain's own
    /// node. Nothing is connected yet.
    pub fn new(target: Target, node_name: impl Into<String>) -> Self {
        Self {
            target,
            node: node_name.into(),
            requested: vec![Extension::Revisions],
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Would like to be told these, too, beyond KPNG's API; [`State::extensions`] is what the brain then does tell.
    #[must_use]
    pub fn request_extensions(mut self, additions: impl IntoIterator<Item = Extension>) -> Self {
        for it in additions {
            if !self.requested.contains(&it) {
                self.requested.push(it);
            }
        }
        self
    }

    fn requested(&self) -> Vec<i32> {
        self.requested.iter().map(|it| (*it).into()).collect()
    }

    /// The same over mutual TLS, if the brain is reached by TCP; a socket in the file system needs none.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(self, tls: crate::tls::ClientTls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// The brain.
    pub fn target(&self) -> &Target {
        &self.target
    }

    fn scheme(&self) -> &'static str {
        #[cfg(feature = "tls")]
        if self.tls.is_some() {
            return "https";
        }
        "http"
    }

    /// The node; empty for the brain's own.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Follows the full state, over one stream that carries changes only (`localv1.Sets/Watch`, as KPNG has it too).
    pub fn watch(&self) -> Watch {
        Watch::new(self)
    }

    /// Follows the changes of the state, each of which leads from one state to the next, over the same stream.
    pub fn changes(&self) -> ChangeWatch {
        ChangeWatch::new(self)
    }

    /// Calls `backend` for every change, until it is dropped.
    ///
    /// At each new connection [`Incremental::reset`] is called, and then everything that is there now;
    /// [`ResetFilter`] makes a minimal difference of it.
    pub async fn run(&self, backend: &mut impl Incremental) -> Infallible {
        incremental::run(self, backend).await
    }

    /// Follows the facts of the whole cluster (`globalv1.Sets/Watch`, as KPNG has it too): what a brain needs that follows
    /// another one.
    pub fn cluster(&self) -> ClusterWatch {
        ClusterWatch::new(self)
    }

    /// Asks for one full state after the other (`localnetv1.Endpoints/Next`, the long poll of KEP-2104), beginning with
    /// what is not the revision of `from`: [`NextFilter::default`] for whatever there is.
    pub fn poll(&self, from: NextFilter) -> Poll {
        Poll::new(self, from)
    }
}

/// What went wrong with a connection, with its causes.
fn failure(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut cause = Some(error);
    while let Some(error) = cause {
        let part = match error.downcast_ref::<tonic::Status>() {
            Some(status) => format!("{} ({:?})", status.message(), status.code()),
            None => error.to_string(),
        };
        // Many an error says what its cause says.
        if !text.contains(&part) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}

async fn connect(client: &Client) -> Result<Channel, String> {
    let (scheme, target) = (client.scheme(), &client.target);
    let address = match target {
        Target::Unix(path) => format!("unix://{}", path.display()),
        Target::Tcp { host, port } if host.contains(':') => format!("{scheme}://[{host}]:{port}"),
        Target::Tcp { host, port } => format!("{scheme}://{host}:{port}"),
    };
    let endpoint = Endpoint::from_shared(address).map_err(|it| failure(&it))?;
    #[cfg(feature = "tls")]
    let endpoint = match (&client.tls, target) {
        (Some(tls), Target::Tcp { host, .. }) => {
            endpoint.tls_config(tls.config(host)).map_err(|it| failure(&it))?
        }
        _ => endpoint,
    };
    endpoint
        .connect_timeout(PATIENCE)
        // A host that is gone is noticed within half a minute. HTTP/2 pings would do the same for a process that hangs,
        // but a server in Go takes more than one in five minutes for an attack.
        .tcp_keepalive(Some(Duration::from_secs(15)))
        .tcp_keepalive_interval(Some(Duration::from_secs(5)))
        .tcp_keepalive_retries(Some(3))
        .connect()
        .await
        .map_err(|it| failure(&it))
}
