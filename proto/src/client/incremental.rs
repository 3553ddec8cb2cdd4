//! One callback per change.
//!
//! Invariant: an endpoint never exists without its Service.
//! Services are set before their endpoints and deleted after them.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
};

use super::{connect::Client, node_view::NodeView, session::Session, view::Event};
use crate::{
    DiffStore,
    digest::position,
    localv1::{Endpoint, Node, Service, Set},
};

/// A backend with a callback for each kind of change; an implementation writes `async fn`.
///
/// The callbacks come in change sets, each of which ends with [`sync`](Self::sync). Only at a sync is the state consistent.
/// The brain regards a change set as active once its sync has returned, and sends nothing more until then: a slow backend
/// skips states. The first error ends [`Client::run`](super::Client::run).
///
/// ```no_run
/// use std::io;
///
/// use proxy_contract::{
///     client::{Client, Incremental},
///     localv1::{Endpoint, Service},
/// };
///
/// struct Backend;
///
/// impl Incremental for Backend {
///     type Error = io::Error;
///
///     async fn set_service(&mut self, service: &Service) -> io::Result<()> {
///         println!("set {}/{}", service.namespace, service.name);
///         Ok(())
///     }
///     async fn delete_service(&mut self, namespace: &str, name: &str) -> io::Result<()> {
///         println!("delete {namespace}/{name}");
///         Ok(())
///     }
///     async fn set_endpoint(&mut self, _: &str, service: &str, key: &str, _: &Endpoint) -> io::Result<()> {
///         println!("set {key} of {service}");
///         Ok(())
///     }
///     async fn delete_endpoint(&mut self, _: &str, service: &str, key: &str) -> io::Result<()> {
///         println!("delete {key} of {service}");
///         Ok(())
///     }
///     async fn sync(&mut self) -> io::Result<()> {
///         println!("in sync");
///         Ok(())
///     }
/// }
/// # async fn example(client: Client) -> io::Result<()> {
/// client.run(&mut Backend).await?;
/// # Ok(())
/// # }
/// ```
pub trait Incremental {
    /// The error of a change that cannot be made.
    type Error: Send;

    /// A Service was added or changed.
    fn set_service(&mut self, service: &Service) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// A Service was deleted; its endpoints were deleted before.
    fn delete_service(
        &mut self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// An endpoint was added or changed; `key` identifies it within its Service.
    fn set_endpoint(
        &mut self,
        namespace: &str,
        service: &str,
        key: &str,
        endpoint: &Endpoint,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// An endpoint was deleted.
    fn delete_endpoint(
        &mut self,
        namespace: &str,
        service: &str,
        key: &str,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// A node of the cluster was added or changed; only with the extension `Nodes`.
    fn set_node(&mut self, _node: &Node) -> impl Future<Output = Result<(), Self::Error>> + Send {
        std::future::ready(Ok(()))
    }
    /// A node of the cluster was deleted.
    fn delete_node(&mut self, _name: &str) -> impl Future<Output = Result<(), Self::Error>> + Send {
        std::future::ready(Ok(()))
    }
    /// The change set is complete.
    fn sync(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// Calls the backend at each sync that changes something, and at the first one: for what was added or changed, and then
/// for what was deleted, which after a reset is what was not set again. Returns between change sets, once `cancelled` is ready.
pub(super) async fn run<B: Incremental>(
    client: &Client,
    backend: &mut B,
    cancelled: impl Future<Output = ()>,
    is_once: bool,
) -> Result<(), B::Error> {
    let mut session = Session::<NodeView>::new(client);
    let mut store = Store::default();
    let mut is_first = true;
    let mut cancelled = pin!(cancelled);
    loop {
        let Some(event) = unless(cancelled.as_mut(), session.next()).await else { return Ok(()) };
        if !store.apply(event) {
            continue;
        }
        if store.call(backend).await? || is_first {
            backend.sync().await?;
        }
        is_first = false;
        if is_once {
            return Ok(());
        }
    }
}

/// The result of `work`, unless `cancelled` is ready: also if there is always work.
async fn unless<T>(
    mut cancelled: Pin<&mut impl Future<Output = ()>>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|context| match cancelled.as_mut().poll(context) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => work.as_mut().poll(context).map(Some),
    })
    .await
}

/// The state of the backend, and the changes that the brain has sent.
#[derive(Default)]
struct Store {
    nodes: DiffStore<Arc<str>, Node>,
    services: DiffStore<Arc<str>, Service>,
    endpoints: DiffStore<(Arc<str>, Arc<str>), Endpoint>,
}

impl Store {
    /// Returns whether the change set is complete.
    fn apply(&mut self, event: Event<NodeView>) -> bool {
        let Self { nodes, services, endpoints } = self;
        match event {
            Event::Reset(_) => {
                nodes.reset();
                services.reset();
                endpoints.reset();
            }
            Event::Keep(kept) => {
                nodes.keep(|it| kept.contains(position(Set::NodesSet, it)));
                services.keep(|it| kept.contains(position(Set::ServicesSet, it)));
                endpoints.keep(|(service, _)| kept.contains(position(Set::ServicesSet, service)));
            }
            // Backends without a packet path have no use for them.
            Event::ServiceCidr(..) | Event::Pod(..) => {}
            Event::Node(name, node) => nodes.put(name, node),
            Event::Service(name, service) => services.put(name, service),
            Event::Endpoint(service, key, endpoint) => endpoints.put((service, key), endpoint),
            Event::Sync(_) => {
                nodes.done();
                services.done();
                endpoints.done();
                return true;
            }
        }
        false
    }

    /// Calls the backend for each change of a change set; returns whether there was one.
    async fn call<B: Incremental>(&self, backend: &mut B) -> Result<bool, B::Error> {
        let Self { nodes, services, endpoints } = self;
        for (_, node) in nodes.created().chain(nodes.updated()) {
            backend.set_node(node).await?;
        }
        for (_, service) in services.created().chain(services.updated()) {
            backend.set_service(service).await?;
        }
        for ((service, key), it) in endpoints.created().chain(endpoints.updated()) {
            let (namespace, service) = split(service);
            backend.set_endpoint(namespace, service, key, it).await?;
        }
        for ((service, key), _) in endpoints.deleted().rev() {
            let (namespace, service) = split(service);
            backend.delete_endpoint(namespace, service, key).await?;
        }
        for (name, _) in services.deleted().rev() {
            let (namespace, name) = split(name);
            backend.delete_service(namespace, name).await?;
        }
        for (name, _) in nodes.deleted().rev() {
            backend.delete_node(name).await?;
        }
        Ok(nodes.has_changes() || services.has_changes() || endpoints.has_changes())
    }
}

fn split(service: &str) -> (&str, &str) {
    service.split_once('/').unwrap_or(("", service))
}
