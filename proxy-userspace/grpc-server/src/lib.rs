//! The gRPC server: node states as streams and as a long poll, the cluster state, health and reflection.
//!
//! Invariant: a client can only harm itself.
//! A client that is slow, silent, disconnected or sends garbage has a bounded cost and affects no other client.

#![forbid(unsafe_code)]

mod authz;
mod change_set;
mod change_stream;
mod clients;
mod cluster_diff;
mod cluster_sets;
mod connection;
mod encoded;
mod explanations;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod listen;
mod long_poll;
mod node_changes;
mod node_diff;
mod node_sets;
mod nodes;
mod resume;
mod status;
mod tls;

use std::{future::Future, sync::Arc};

use proxy_contract::{
    globalv1::{nodes_server::NodesServer, sets_server as cluster_sets_server},
    localnetv1::endpoints_server::{self, EndpointsServer},
    localv1::{
        explanations_server::ExplanationsServer,
        sets_server::{self, SetsServer},
    },
};
use publish::{
    NodeStates,
    cluster::{ClusterPublisher, ClusterSubscription},
    followers::Followers,
};
use tokio::sync::Mutex;
use tonic::service::Routes;
use tonic_health::ServingStatus;

use self::{
    change_stream::Turns, cluster_sets::ClusterSets, connection::serve_connections,
    explanations::ExplanationService, long_poll::LongPoll, node_sets::NodeSets, nodes::NodesList,
};

pub use clients::{ClientStats, Clients};
pub use explanations::{Explain, PendingExplanation, Unexplained};
pub use listen::{ByteStream, ListenError, Listener};
pub use tls::ServerTls;

/// The services besides health and reflection.
const SERVICES: [&str; 3] =
    [sets_server::SERVICE_NAME, cluster_sets_server::SERVICE_NAME, endpoints_server::SERVICE_NAME];
/// The longest accepted request, in bytes.
const MAX_REQUEST_SIZE: usize = 64 << 10;

/// The descriptors of the services are invalid.
#[derive(Debug, thiserror::Error)]
#[error("gRPC reflection: {0}")]
pub struct ServeError(#[from] tonic_reflection::server::Error);

#[derive(Clone)]
pub struct ServedData {
    pub nodes: Arc<dyn NodeStates>,
    pub cluster: ClusterSubscription,
    /// The followers of nodes, among which its clients are listed.
    pub followers: Followers,
    /// Explains connections; without it, the server does not offer the service `Explanations`.
    pub explainer: Option<Explain>,
}

impl ServedData {
    /// The states of nodes and of the cluster, without explanations.
    pub fn new(nodes: impl NodeStates, cluster: &ClusterPublisher) -> Self {
        let (nodes, cluster) = (Arc::new(nodes), cluster.subscribe());
        Self { nodes, cluster, followers: Followers::default(), explainer: None }
    }
}

/// Serves at `listener` until `shutdown`, and then up to one second longer until all clients have their responses.
///
/// Health is NOT_SERVING until `ready`.
pub async fn serve(
    listener: Listener,
    served: ServedData,
    ready: impl Future<Output = ()>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let report = async |status| {
        for service in SERVICES.into_iter().chain([""]) {
            reporter.set_service_status(service, status).await;
        }
    };
    report(ServingStatus::NotServing).await;
    let reflection = || {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proxy_contract::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(tonic_health::pb::health_server::SERVICE_NAME);
        SERVICES.into_iter().fold(builder, tonic_reflection::server::Builder::with_service_name)
    };
    let ServedData { nodes, cluster, followers, explainer } = served;
    let turns = Turns::default();
    let node_watch = SetsServer::new(NodeSets::new(Arc::clone(&nodes), turns.clone(), followers.clone()));
    let long_poll = EndpointsServer::new(LongPoll { nodes });
    let cluster_watch = cluster_sets_server::SetsServer::new(ClusterSets { cluster, turns });
    let nodes_list = NodesServer::new(NodesList { followers, turn: Mutex::default() });
    let explanations = explainer
        .map(|explainer| ExplanationsServer::new(ExplanationService { explainer, turn: Arc::default() }));
    let mut routes = Routes::new(health)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .add_service(node_watch.max_decoding_message_size(MAX_REQUEST_SIZE))
        .add_service(cluster_watch.max_decoding_message_size(MAX_REQUEST_SIZE))
        .add_service(nodes_list.max_decoding_message_size(MAX_REQUEST_SIZE))
        .add_service(long_poll.max_decoding_message_size(MAX_REQUEST_SIZE));
    if let Some(it) = explanations {
        routes = routes.add_service(it.max_decoding_message_size(MAX_REQUEST_SIZE));
    }
    let routes = routes.prepare();
    tracing::info!(address = %listener.address(), "serving gRPC");
    let reload_certificates = reload_certificates(listener.tls().cloned());
    let report_ready = async {
        ready.await;
        report(ServingStatus::Serving).await;
        std::future::pending::<()>().await;
    };
    // Nothing is reported while the connections end.
    let stop = async {
        tokio::select! {
            biased;
            () = shutdown => {}
            () = report_ready => {}
            () = reload_certificates => {}
        }
    };
    serve_connections(listener, routes, stop).await;
    Ok(())
}

/// Reloads the certificates periodically, if there are any; never returns.
async fn reload_certificates(tls: Option<Arc<ServerTls>>) {
    match tls {
        Some(tls) => match tls.reload_periodically().await {},
        None => std::future::pending().await,
    }
}
