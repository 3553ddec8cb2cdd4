//! Clients of brains: agents as the product's, and clients of other versions, with some of the extensions of KPNG's API or with
//! none.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};

use hyper_util::rt::TokioIo;
use prost::Message;
use proxy_contract::{
    client::{ServiceEndpoints, State},
    localv1::{Endpoint, OpItem, Ref, Service, Set, WatchReq, op_item::Op, sets_client::SetsClient},
};
use publish::upstream::Upstream;
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, transport};
use tower::service_fn;
use wire::Extensions;

use crate::{
    brain::client_of,
    history,
    kernel::{self, Kernel},
    network::Server,
    truth::Observed,
    world::{Name, World},
};

#[derive(Clone)]
pub(crate) enum Kind {
    /// The product's agent.
    Agent(Kernel),
    /// With KPNG's API alone, and no code of ours.
    Kpng,
    /// The library's full states, with these extensions.
    Watch(Extensions),
}

/// A client that can be killed and started.
pub(crate) struct Client {
    name: Name,
    node: &'static str,
    brain: usize,
    kind: Kind,
    task: Option<JoinHandle<()>>,
}

impl Client {
    pub(crate) fn new(name: Name, node: &'static str, brain: usize, kind: Kind) -> Self {
        Self { name, node, brain, kind, task: None }
    }

    pub(crate) fn start(&mut self, world: &World) {
        let Self { name, node, brain, kind, .. } = self;
        history::note(format_args!("{name} starts, for {node} at brain {brain}: {}", kind.describe()));
        let (name, node, brain, world) = (*name, *node, *brain, world.clone());
        let client = client_of(&world, name, brain, node);
        self.task = Some(match kind.clone() {
            Kind::Agent(kernel) => tokio::spawn(async move {
                let upstream = Upstream::new(client, node).confirmed_by(kernel.active.subscribe());
                tokio::select! {
                    () = upstream.run() => history::fail("following a brain has ended"),
                    () = kernel::drive(&kernel, upstream.subscribe(), &world) => history::fail("no more states"),
                }
            }),
            Kind::Kpng => tokio::spawn(kpng(name, node, brain, world)),
            Kind::Watch(extensions) => tokio::spawn(async move {
                let mut states = client.request_extensions(extensions.iter()).watch();
                loop {
                    let state = states.next().await;
                    world.observe(name, view(extensions, State::clone(&state)));
                }
            }),
        });
    }

    /// Kills it and starts it again: it knows nothing but what is in its kernel.
    pub(crate) async fn restart(&mut self, world: &World) {
        if let Some(task) = self.task.take() {
            history::note(format_args!("{} is killed", self.name));
            task.abort();
            // It was killed.
            let _ = task.await;
            world.network.close_client(self.name);
        }
        self.start(world);
    }
}

impl Kind {
    fn describe(&self) -> String {
        match self {
            Self::Agent(_) => "an agent".to_owned(),
            Self::Kpng => "KPNG's API alone".to_owned(),
            Self::Watch(it) => format!("full states with {it:?}"),
        }
    }
}

/// What a client of the library has. When its endpoints were changed is no part of what a state means.
fn view(extensions: Extensions, state: State) -> Observed {
    let mut services = state.services;
    for it in services.values_mut() {
        Arc::make_mut(it).service.trigger_time = None;
    }
    Observed::View(extensions, Arc::new(State { revision: None, extensions: Vec::new(), services, ..state }))
}

/// How long a client of KPNG's API waits for a connection, and for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The objects of a client of KPNG's API, by set and path.
type Items = BTreeMap<(i32, String), Vec<u8>>;

/// A client of KPNG's API, written from its rules alone.
async fn kpng(name: Name, node: &'static str, brain: usize, world: World) {
    let mut items = Items::new();
    loop {
        let Err(error) = kpng_stream(name, node, brain, &world, &mut items).await;
        history::note(format_args!("{name} reconnects: {:?}", error.code()));
        sleep(Duration::from_millis(fastrand::u64(50..5_000))).await;
    }
}

async fn kpng_stream(
    name: Name,
    node: &str,
    brain: usize,
    world: &World,
    items: &mut Items,
) -> Result<Infallible, Status> {
    let network = world.network.clone();
    let connector = service_fn(move |_: tonic::codegen::http::Uri| {
        let connecting = network.connect(name, Server::Brain(brain));
        async { connecting.await.map(TokioIo::new) }
    });
    let endpoint = transport::Endpoint::from_static("http://brain")
        .http2_keep_alive_interval(Duration::from_secs(20))
        .keep_alive_while_idle(true);
    let connecting = timeout(ANSWER_TIMEOUT, endpoint.connect_with_connector(connector));
    let channel = connecting.await.map_err(|_| Status::unavailable("no connection"))?;
    let mut sets = SetsClient::new(channel.map_err(|_| Status::unavailable("refused"))?);
    let (requests, receiver) = mpsc::channel(1);
    let request = || WatchReq { node_name: node.to_owned(), ..WatchReq::default() };
    let _ = requests.send(request()).await;
    let opening = timeout(ANSWER_TIMEOUT, sets.watch(ReceiverStream::new(receiver)));
    let mut stream = opening.await.map_err(|_| Status::unavailable("no answer"))??.into_inner();
    // What was not sent since the reset.
    let mut void = BTreeSet::new();
    loop {
        let OpItem { op } = stream.message().await?.ok_or_else(|| Status::ok("the end"))?;
        match op {
            Some(Op::Reset(_)) => void = items.keys().cloned().collect(),
            Some(Op::Set(it)) => {
                let of = it.r#ref.unwrap_or_default();
                check_order(name, items, &void, &of, false);
                let key = (of.set, of.path);
                void.remove(&key);
                items.insert(key, it.bytes.to_vec());
            }
            Some(Op::Delete(of)) => {
                check_order(name, items, &void, &of, true);
                items.remove(&(of.set, of.path));
            }
            Some(Op::Sync(_)) => {
                std::mem::take(&mut void).iter().for_each(|it| drop(items.remove(it)));
                world.observe(name, view(Extensions::default(), state_of(name, items)));
                let _ = requests.send(request()).await;
            }
            other => history::fail(format_args!("{name} was sent what it does not know: {other:?}")),
        }
    }
}

/// Since a reset, no endpoint is without its Service at any time, and only what was sent is deleted.
fn check_order(name: Name, items: &Items, void: &BTreeSet<(i32, String)>, of: &Ref, is_deleted: bool) {
    let key = (of.set, of.path.clone());
    let service = |path: &str| Some((i32::from(Set::ServicesSet), path.rsplit_once('/')?.0.to_owned()));
    let is_sent = |it: &_| items.contains_key(it) && !void.contains(it);
    let is_right = match (of.set(), is_deleted) {
        (Set::EndpointsSet, false) => service(&of.path).is_some_and(|it| is_sent(&it)),
        (Set::ServicesSet, true) => {
            let is_its = |it: &(i32, String)| {
                it.0 == i32::from(Set::EndpointsSet) && service(&it.1).as_ref() == Some(&key) && is_sent(it)
            };
            is_sent(&key) && !items.keys().any(is_its)
        }
        (_, true) => is_sent(&key),
        (_, false) => true,
    };
    if !is_right {
        let verb = if is_deleted { "deleted" } else { "sent" };
        history::fail(format_args!("{name}: {} is {verb} out of order", of.path));
    }
}

fn state_of(name: Name, items: &Items) -> State {
    let mut state = State::default();
    for ((set, path), bytes) in items {
        match Set::try_from(*set) {
            Ok(Set::ServicesSet) => {
                let service: Service = decode(name, path, bytes);
                let it = ServiceEndpoints { service, ..ServiceEndpoints::default() };
                state.services.insert(path.as_str().into(), Arc::new(it));
            }
            Ok(Set::EndpointsSet) => {
                let endpoint: Endpoint = decode(name, path, bytes);
                let (service, key) = path.rsplit_once('/').unwrap_or_default();
                match state.services.get_mut(service) {
                    Some(it) => drop(Arc::make_mut(it).endpoints.insert(key.into(), Arc::new(endpoint))),
                    None => history::fail(format_args!("{name}: {path} is an endpoint without its Service")),
                }
            }
            _ => history::fail(format_args!("{name} was sent an item of set {set}")),
        }
    }
    state
}

fn decode<T: Message + Default>(name: Name, path: &str, bytes: &[u8]) -> T {
    T::decode(bytes).unwrap_or_else(|error| history::fail(format_args!("{name}: {path}: {error}")))
}
