//! The gRPC server of `run` and `brain`, at one or more addresses.

use std::{future::pending, sync::Arc};

use admin::Admin;
use anyhow::Result;
use grpc_server::{Clients, Listener, ServeError, ServedData};
use pipeline::Pipeline;
use publish::CountedNodes;
use tokio::{sync::watch, task::JoinSet};

use super::flags::ListenFlags;

/// Serves until it is dropped.
pub(super) struct GrpcServer {
    servers: JoinSet<Result<(), ServeError>>,
    stop: watch::Sender<bool>,
}

impl GrpcServer {
    /// Serves at all addresses, or at none if one of them cannot be bound; ready as soon as this node has a state.
    pub(super) async fn start(flags: &ListenFlags, pipeline: &Pipeline, admin: &Admin) -> Result<Self> {
        let served = pipeline.served(flags.serve_any_node);
        let counted = CountedNodes::new(served.nodes);
        admin.set_readers(|it| it.watchers = Some(counted.watchers()));
        admin.registry().register_collector(Box::new(counted.watchers()));
        let served = ServedData { nodes: Arc::new(counted), ..served };
        admin.registry().register_collector(Box::new(served.followers.clone()));
        let tls = flags.tls.server()?;
        let access = flags.access();
        let clients = Clients::default();
        admin.registry().register_collector(Box::new(clients.clone()));
        let mut listeners = Vec::new();
        for target in &flags.listen {
            listeners
                .push(Listener::bind_for(target, tls.clone(), access).await?.with_clients(clients.clone()));
        }
        let stop = watch::Sender::new(false);
        let mut servers = JoinSet::new();
        for listener in listeners {
            let (mut states, mut stopped) = (pipeline.subscribe(), stop.subscribe());
            let served = served.clone();
            servers.spawn(async move {
                let ready = async {
                    if states.next().await.is_none() {
                        pending::<()>().await;
                    }
                };
                let stopped = async { drop(stopped.wait_for(|it| *it).await.map(|_| ())) };
                grpc_server::serve(listener, served, ready, stopped).await
            });
        }
        Ok(Self { servers, stop })
    }

    /// Waits until a listener fails; forever without listeners.
    pub(super) async fn failed(&mut self) -> Result<()> {
        match self.servers.join_next().await {
            Some(result) => Ok(result??),
            None => pending().await,
        }
    }

    /// Stops all listeners. Drop the publisher first, so that clients see the end of their streams.
    pub(super) async fn stop(mut self) {
        self.stop.send_replace(true);
        while self.servers.join_next().await.is_some() {}
    }
}
