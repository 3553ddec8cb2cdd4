//! The states of nodes, served to others at one or more addresses.

use anyhow::Result;
use proxy_contract::Target;
use publish::{
    Subscription,
    grpc::{self, Listener, ServeError, ServedData},
};
use tokio::{sync::watch, task::JoinSet};

use super::tls;

/// What serves while it is alive.
pub(super) struct Serving {
    servers: JoinSet<Result<(), ServeError>>,
    stop: watch::Sender<bool>,
}

impl Serving {
    /// Serves what is `served` at all `targets`, or at none if one cannot be had; ready as soon as there is one of `states`.
    pub(super) async fn start(
        targets: &[Target],
        tls: &tls::ServerFlags,
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

    /// Waits for a server that ends by itself; for ever if there is none.
    pub(super) async fn ended(&mut self) -> Result<()> {
        match self.servers.join_next().await {
            Some(result) => Ok(result??),
            None => std::future::pending().await,
        }
    }

    /// Ends it; the publisher should be gone by then, so that clients are told that it is the end.
    pub(super) async fn stop(mut self) {
        self.stop.send_replace(true);
        while self.servers.join_next().await.is_some() {}
    }
}
