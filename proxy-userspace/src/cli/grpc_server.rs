//! The gRPC server of `run` and `brain`, at one or more addresses.

use anyhow::Result;
use proxy_contract::Target;
use publish::{
    Subscription,
    grpc::{self, Listener, ServeError, ServedData},
};
use tokio::{sync::watch, task::JoinSet};

use super::flags::ServerTlsFlags;

/// Serves until it is dropped.
pub(super) struct GrpcServer {
    servers: JoinSet<Result<(), ServeError>>,
    stop: watch::Sender<bool>,
}

impl GrpcServer {
    /// Serves at all `targets`, or at none if one of them cannot be bound; ready as soon as `states` has a state.
    pub(super) async fn start(
        targets: &[Target],
        tls: &ServerTlsFlags,
        served: ServedData,
        states: &Subscription,
    ) -> Result<Self> {
        let tls = tls.server()?;
        let mut listeners = Vec::new();
        for target in targets {
            listeners.push(Listener::bind_tls(target, tls.clone()).await?);
        }
        let stop = watch::Sender::new(false);
        let mut servers = JoinSet::new();
        for listener in listeners {
            let (mut states, mut stopped) = (states.clone(), stop.subscribe());
            let served = served.clone();
            servers.spawn(async move {
                let ready = async { drop(states.next().await) };
                let stopped = async { drop(stopped.wait_for(|it| *it).await.map(|_| ())) };
                grpc::serve(listener, served, ready, stopped).await
            });
        }
        Ok(Self { servers, stop })
    }

    /// Waits until a listener fails; for ever without listeners.
    pub(super) async fn failed(&mut self) -> Result<()> {
        match self.servers.join_next().await {
            Some(result) => Ok(result??),
            None => std::future::pending().await,
        }
    }

    /// Stops all listeners. Drop the publisher first, so that clients see the end of their streams.
    pub(super) async fn stop(mut self) {
        self.stop.send_replace(true);
        while self.servers.join_next().await.is_some() {}
    }
}
