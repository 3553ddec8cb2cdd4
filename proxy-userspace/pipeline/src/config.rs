//! What a pipeline is started with, and why it cannot be.

use std::{io, path::PathBuf};

use model::RequestedMetadata;
use proxy_contract::client::Client;
use source::{
    file::FileError,
    kube::{ClientConfig, ClientConfigError, WatchedPods},
};

#[derive(Debug)]
pub struct Config {
    pub node: String,
    pub source: SourceConfig,
    /// Whether a missing Node object of that node is reported; not so if clients name the node that they ask for.
    pub checks_node: bool,
    /// Which labels and annotations of Services clients receive.
    pub service_metadata: RequestedMetadata,
    /// Which Services the brain serves.
    pub brain: brain::Options,
}

/// Where the cluster state comes from.
#[derive(Debug)]
pub enum SourceConfig {
    /// A manifest or a folder of manifests.
    File(PathBuf),
    /// Another brain.
    Api(Client),
    /// An API server.
    Kube {
        /// Where it is, and the credentials.
        client_config: ClientConfig,
        /// Whether all Nodes are watched, or only the one of the node to serve.
        all_nodes: bool,
        /// Which Pods are watched, for our annotation.
        pods: WatchedPods,
        /// Whether it is followed in a thread of its own: while thousands of clients are sent a change, the next ones come in,
        /// and go out together.
        own_thread: bool,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    File(#[from] FileError),
    /// The configuration of the API server's client is unusable.
    #[error(transparent)]
    Kube(#[from] ClientConfigError),
    #[error("cannot start a thread for the source: {0}")]
    Thread(#[source] io::Error),
    /// None of the manifests can be parsed.
    #[error("no manifest in {} can be parsed; the warnings name the reasons", .0.display())]
    NoManifest(PathBuf),
}
