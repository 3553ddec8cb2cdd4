//! What is published, served over gRPC: the two views of a node's state, the cluster's facts, health and reflection.
//!
//! The one rule: a client can only hurt itself.
//! One that is slow, silent, gone or talks nonsense costs a bounded amount, and nobody else notices.

mod accept;
mod authz;
mod cluster_diff;
mod global;
mod listen;
mod next;
mod node_diff;
mod tls;
mod watch;
mod watch_session;

use std::{future::Future, sync::Arc, time::Duration};

use proxy_contract::{
    Target,
    globalv1::sets_server as global_sets,
    localnetv1::endpoints_server::{self, EndpointsServer},
    localv1::sets_server::{self, SetsServer},
};
use tokio::time::timeout;
use tonic::{Status, transport};
use tonic_health::ServingStatus;

use self::accept::Clients;
use crate::{Subscription, cluster::ClusterSubscription};

pub use listen::{ListenError, Listener};
pub use tls::ServerTls;

/// What is served besides health and reflection.
const SERVICES: [&str; 3] =
    [sets_server::SERVICE_NAME, global_sets::SERVICE_NAME, endpoints_server::SERVICE_NAME];
/// The longest request that is read.
const LONGEST_REQUEST: usize = 64 << 10;
/// How often a silent client is asked whether it is still there, and how long it has to answer.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(20));
/// How long clients have to go when the server ends.
const FAREWELL: Duration = Duration::from_secs(1);

/// The nodes whose states are served.
pub trait NodeStates: Send + Sync + 'static {
    /// Follows the state of a node, beginning with what is not the revision `seen` (instance and revision); of the
    /// brain's own node if the name is empty.
    fn subscribe(&self, node: &str, seen: (u64, u64)) -> Result<Subscription, SubscribeError>;
}

/// Why a node's state is not to be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubscribeError {
    /// Only the brain's own node is served.
    #[error(
        "the state of this node is not served here; ask its own brain, or start this one with --serve-any-node"
    )]
    NotServed,
    /// The brain follows another one, which gives it the state of its own node and no facts.
    #[error(
        "the state of this node cannot be decided here: the brain that this one follows gives no facts \
         (globalv1.Sets), only the state of one node; ask that brain for this node"
    )]
    NoClusterState,
    /// No node can be called so.
    #[error("no node can be called so: lower-case letters, digits, dashes and dots only, 253 at most")]
    InvalidName,
    /// So many others are followed already.
    #[error("no Node object is called so, and {0} such nodes are followed already")]
    TooManyUnknownNodes(usize),
    /// The brain is about to end.
    #[error("the brain is stopping")]
    ShuttingDown,
}

/// Counts who follows nodes.
pub struct CountedNodes {
    nodes: Arc<dyn NodeStates>,
    watchers: Watchers,
}

/// Who follows, without a name: each holds a copy.
pub(crate) type Watchers = Arc<()>;

impl CountedNodes {
    /// Counts who follows these.
    pub fn new(nodes: Arc<dyn NodeStates>) -> Self {
        Self { nodes, watchers: Watchers::default() }
    }

    /// How many follow at the time it is asked.
    pub fn watchers(&self) -> impl Fn() -> usize + Send + Sync + 'static {
        let watchers = Arc::downgrade(&self.watchers);
        // One of them is ours.
        move || watchers.strong_count().saturating_sub(1)
    }
}

impl NodeStates for CountedNodes {
    fn subscribe(&self, node: &str, seen: (u64, u64)) -> Result<Subscription, SubscribeError> {
        Ok(self.nodes.subscribe(node, seen)?.counted(Arc::clone(&self.watchers)))
    }
}

impl SubscribeError {
    fn status(&self, node: &str) -> Status {
        let message = format!("node {:?}: {self}", node.chars().take(80).collect::<String>());
        match self {
            Self::NotServed => Status::not_found(message),
            Self::NoClusterState => Status::failed_precondition(message),
            Self::InvalidName => Status::invalid_argument(message),
            Self::TooManyUnknownNodes(_) => Status::resource_exhausted(message),
            Self::ShuttingDown => Status::unavailable(message),
        }
    }
}

/// One node alone.
#[derive(Clone, Debug)]
pub struct SingleNode {
    name: Arc<str>,
    states: Subscription,
}

impl SingleNode {
    /// The node of that name, whose states come from `states`.
    pub fn new(name: impl Into<Arc<str>>, states: Subscription) -> Self {
        Self { name: name.into(), states }
    }
}

impl NodeStates for SingleNode {
    fn subscribe(&self, node: &str, seen: (u64, u64)) -> Result<Subscription, SubscribeError> {
        let is_own = node.is_empty() || *node == *self.name;
        if is_own { Ok(self.states.resume(seen.0, seen.1)) } else { Err(SubscribeError::NotServed) }
    }
}

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// gRPC itself.
    #[error("serving {target}: {error}")]
    Transport {
        /// Where.
        target: Target,
        /// What it said.
        #[source]
        error: transport::Error,
    },
    /// What we say about ourselves cannot be read.
    #[error("the description of the services cannot be read: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// What is served.
#[derive(Clone)]
pub struct ServedData {
    /// The states of nodes.
    pub nodes: Arc<dyn NodeStates>,
    /// The facts of the cluster.
    pub cluster: ClusterSubscription,
}

/// Serves what is `served` at `listener` until `shutdown`, and a moment longer for those who are just being answered.
///
/// Health says NOT_SERVING until `ready`.
pub async fn serve(
    listener: Listener,
    served: ServedData,
    ready: impl Future<Output = ()>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let target = listener.address().clone();
    let (reporter, health) = tonic_health::server::health_reporter();
    let say = async |status| {
        for service in SERVICES.into_iter().chain([""]) {
            reporter.set_service_status(service, status).await;
        }
    };
    say(ServingStatus::NotServing).await;
    let reflection = || {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proxy_contract::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(tonic_health::pb::health_server::SERVICE_NAME);
        // What the descriptions speak of besides is not served.
        SERVICES.into_iter().fold(builder, tonic_reflection::server::Builder::with_service_name)
    };
    let ServedData { nodes, cluster } = served;
    let watch = SetsServer::new(watch::Watch { nodes: Arc::clone(&nodes) });
    let next = EndpointsServer::new(next::Next { nodes });
    let global = global_sets::SetsServer::new(global::GlobalWatch { cluster });
    let router = transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE.0))
        .http2_keepalive_timeout(Some(KEEPALIVE.1))
        .add_service(health)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .add_service(watch.max_decoding_message_size(LONGEST_REQUEST))
        .add_service(global.max_decoding_message_size(LONGEST_REQUEST))
        .add_service(next.max_decoding_message_size(LONGEST_REQUEST));
    tracing::info!("serving {target}");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let look = look(listener.tls().cloned());
    let clients = Clients::new(listener);
    let mut serving = std::pin::pin!(router.serve_with_incoming_shutdown(clients, async {
        // Dropped or used: both mean the end.
        let _ = stopped.await;
    }));
    let failed = |error| ServeError::Transport { target: target.clone(), error };
    let became_ready = async {
        ready.await;
        say(ServingStatus::Serving).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        result = &mut serving => return result.map_err(failed),
        () = became_ready => {}
        () = look => {}
        () = shutdown => {}
    }
    drop(stop);
    // Those who do not go in time are cut off.
    timeout(FAREWELL, serving).await.unwrap_or(Ok(())).map_err(failed)
}

/// Looks at the certificates now and then, if there are any.
async fn look(tls: Option<Arc<ServerTls>>) {
    match tls {
        Some(tls) => match tls.look().await {},
        None => std::future::pending().await,
    }
}
