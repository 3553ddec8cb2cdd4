//! A brain that can be killed.

use std::{path::Path, time::Duration};

use grpc_server::{Listener, ServedData};
use model::state::NodeState;
use proxy_contract::Target;
use publish::{
    Publisher, SingleNode,
    cluster::{ClusterPublisher, ClusterSnapshot},
};
use tokio::runtime::{Builder, Runtime};

use crate::RunError;

/// The node whose state is served.
pub const NODE: &str = "n1";

/// Serves the state of one node at a Unix socket.
pub(crate) struct Brain {
    publisher: Publisher,
    cluster: ClusterPublisher,
    runtime: Runtime,
}

impl Brain {
    pub(crate) fn start(socket: &Path) -> Result<Self, RunError> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(RunError::Runtime)?;
        let listener = runtime.block_on(Listener::bind(&Target::Unix(socket.to_owned())))?;
        let publisher = Publisher::new(NODE);
        let cluster = ClusterPublisher::new(None);
        cluster.publish(ClusterSnapshot::Unavailable);
        let served = ServedData::new(SingleNode::new(NODE, publisher.subscribe()), &cluster);
        runtime.spawn(grpc_server::serve(listener, served, async {}, std::future::pending()));
        Ok(Self { publisher, cluster, runtime })
    }

    pub(crate) fn publish(&self, state: NodeState) {
        self.publisher.publish(state);
    }

    /// Ends at once: clients see their streams break off.
    pub(crate) fn kill(self) {
        self.runtime.shutdown_timeout(Duration::from_secs(5));
        drop((self.publisher, self.cluster));
    }
}
