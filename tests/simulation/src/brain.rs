//! A brain, as a process that runs the product's pipeline and gRPC server.

use grpc_server::Listener;
use pipeline::{Config, Pipeline, SourceConfig};
use proxy_contract::{Target, client::Client};
use source::kube::{ClientConfig, WatchedPods, connect_with};
use tokio::{
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
};

use crate::{
    history,
    kernel::{self, Kernel},
    network::{Accepted, Server},
    truth::options,
    world::{Name, World},
};

/// The node of every brain.
pub(crate) const OWN_NODE: &str = "n1";

/// A brain that can be killed and started.
pub(crate) struct Brain {
    index: usize,
    /// Whether it watches all Nodes, and serves the states of any.
    any_node: bool,
    /// The kernel of its own node.
    kernel: Kernel,
    running: Option<(JoinHandle<()>, watch::Sender<bool>)>,
}

impl Brain {
    /// The first one watches the API server, every other one follows the one before.
    pub(crate) fn new(index: usize, any_node: bool, kernel: Kernel) -> Self {
        Self { index, any_node, kernel, running: None }
    }

    fn name(&self) -> Name {
        ["brain 0", "brain 1"][self.index]
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    pub(crate) fn is_first(&self) -> bool {
        self.index == 0
    }

    pub(crate) fn start(&mut self, world: &World) {
        history::note(format_args!("{} starts", self.name()));
        let (name, network) = (self.name(), world.network.clone());
        let source = match self.index {
            0 => SourceConfig::Kube {
                client_config: ClientConfig {
                    server: Some("http://192.0.2.1".into()),
                    connector: Some(connect_with(move || network.connect(name, Server::Api))),
                    ..ClientConfig::default()
                },
                all_nodes: self.any_node,
                pods: WatchedPods::None,
                own_thread: false,
            },
            _ => SourceConfig::Api(client_of(world, name, self.index - 1, OWN_NODE)),
        };
        let config = Config {
            node: OWN_NODE.into(),
            source,
            checks_node: true,
            service_metadata: Default::default(),
            brain: options(),
        };
        let connections = world.network.listen(Server::Brain(self.index));
        let (stop, stopping) = watch::channel(false);
        let run = run(config, self.any_node, connections, stopping, self.kernel.clone(), world.clone());
        self.running = Some((tokio::spawn(run), stop));
    }

    /// Kills it, or asks it to end.
    pub(crate) async fn stop(&mut self, world: &World, kills: bool) {
        let Some((task, stop)) = self.running.take() else { return };
        history::note(format_args!("{} {}", self.name(), if kills { "is killed" } else { "ends" }));
        if kills {
            task.abort();
        } else {
            stop.send_replace(true);
        }
        // An error if it was killed.
        let _ = task.await;
        world.network.close(Server::Brain(self.index));
        world.network.close_client(self.name());
    }
}

pub(crate) fn client_of(world: &World, name: Name, brain: usize, node: &str) -> Client {
    let network = world.network.clone();
    Client::new(target().into(), node).connect_by(move || network.connect(name, Server::Brain(brain)))
}

fn target() -> Target {
    Target::Unix("/in-memory".into())
}

async fn run(
    config: Config,
    any_node: bool,
    connections: mpsc::Receiver<Accepted>,
    mut stopping: watch::Receiver<bool>,
    kernel: Kernel,
    world: World,
) {
    let pipeline = Pipeline::start(config).unwrap_or_else(|error| history::fail(error));
    let mut states = pipeline.subscribe();
    let (stop_server, server_stopped) = watch::channel(false);
    // Ends with this function, also if that is aborted.
    let mut server = JoinSet::new();
    server.spawn({
        let served = pipeline.served(any_node);
        let mut server_stopped = server_stopped;
        async move {
            let ready = async { drop(states.next().await) };
            let stopped = async { drop(server_stopped.wait_for(|it| *it).await.map(|_| ())) };
            grpc_server::serve(Listener::given(target(), connections), served, ready, stopped).await
        }
    });
    tokio::select! {
        () = pipeline.run(&()) => history::fail("the source of a brain has ended"),
        () = kernel::drive(&kernel, pipeline.subscribe(), &world) => history::fail("no more states"),
        _ = stopping.wait_for(|it| *it) => {}
    }
    // As the binary does: clients see the end of their streams.
    drop(pipeline);
    stop_server.send_replace(true);
    // It cannot fail.
    let _ = server.join_next().await;
}

pub(crate) async fn serve_api(world: World, mut connections: mpsc::Receiver<Accepted>) {
    while let Some(stream) = connections.recv().await {
        tokio::spawn(world.server.serve(stream));
    }
}
