//! One callback per change.
//!
//! Invariant: an endpoint never exists without its Service.
//! Services are set before their endpoints and deleted after them.

use std::convert::Infallible;

use super::{
    connect::Connector,
    node_view::NodeView,
    session::{Event, Session},
};
use crate::{
    DiffStore,
    localv1::{Endpoint, Node, Service},
};

/// A backend with a callback for each kind of change.
///
/// The callbacks come in change sets, each of which ends with [`sync`](Self::sync). Only at a sync is the state consistent.
/// A callback must not block for long, since it blocks the connection.
pub trait Incremental {
    /// A Service was added or changed.
    fn set_service(&mut self, service: &Service);
    /// A Service was deleted; its endpoints were deleted before.
    fn delete_service(&mut self, namespace: &str, name: &str);
    /// An endpoint was added or changed; `key` identifies it within its Service.
    fn set_endpoint(&mut self, namespace: &str, service: &str, key: &str, endpoint: &Endpoint);
    /// An endpoint was deleted.
    fn delete_endpoint(&mut self, namespace: &str, service: &str, key: &str);
    /// A node of the cluster was added or changed; only with the extension `Nodes`.
    fn set_node(&mut self, _node: &Node) {}
    /// A node of the cluster was deleted.
    fn delete_node(&mut self, _name: &str) {}
    /// The change set is complete.
    fn sync(&mut self);
    /// A new connection: everything set so far is void and will be set again. The last state may stay active until the
    /// next [`sync`](Self::sync).
    fn reset(&mut self);
}

pub(super) async fn run(connector: &Connector, backend: &mut impl Incremental) -> Infallible {
    let mut session = Session::<NodeView>::new(connector);
    loop {
        match session.next().await {
            Event::Reset(_) => backend.reset(),
            Event::SetNode(_, node) => backend.set_node(&node),
            Event::DeleteNode(name) => backend.delete_node(&name),
            Event::SetService(_, service) => backend.set_service(&service),
            Event::DeleteService(name) => {
                let (namespace, name) = split(&name);
                backend.delete_service(namespace, name);
            }
            Event::SetEndpoint(service, key, endpoint) => {
                let (namespace, service) = split(&service);
                backend.set_endpoint(namespace, service, &key, &endpoint);
            }
            Event::DeleteEndpoint(service, key) => {
                let (namespace, service) = split(&service);
                backend.delete_endpoint(namespace, service, &key);
            }
            Event::Sync(_) => backend.sync(),
        }
    }
}

fn split(service: &str) -> (&str, &str) {
    service.split_once('/').unwrap_or(("", service))
}

/// A backend that stores the state and turns a [`reset`](Incremental::reset) into a minimal difference.
///
/// It calls the inner backend only at a sync: first the Services and endpoints that were added or changed, then the
/// endpoints and Services that were deleted, which after a reset are those that were not set again. It skips change sets
/// without changes, except for the first.
///
/// ```no_run
/// # use proxy_contract::{client::{Client, Incremental, ResetFilter}, Target};
/// # async fn example(target: Target, backend: impl Incremental) {
/// // `backend.reset()` is never called, and a restart of the brain without changes causes no call at all.
/// Client::new(target, "node-1").run(&mut ResetFilter::new(backend)).await;
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ResetFilter<B> {
    backend: B,
    nodes: DiffStore<String, Node>,
    services: DiffStore<(String, String), Service>,
    endpoints: DiffStore<(String, String, String), Endpoint>,
    has_synced: bool,
}

impl<B: Incremental> ResetFilter<B> {
    /// Wraps `backend`.
    pub fn new(backend: B) -> Self {
        let (nodes, services, endpoints) = Default::default();
        Self { backend, nodes, services, endpoints, has_synced: false }
    }

    /// The wrapped backend.
    pub fn get_ref(&self) -> &B {
        &self.backend
    }
}

impl<B: Incremental> Incremental for ResetFilter<B> {
    fn set_service(&mut self, service: &Service) {
        self.services.set((service.namespace.clone(), service.name.clone()), service.clone());
    }

    fn delete_service(&mut self, namespace: &str, name: &str) {
        self.services.delete(&(namespace.to_owned(), name.to_owned()));
    }

    fn set_endpoint(&mut self, namespace: &str, service: &str, key: &str, endpoint: &Endpoint) {
        let path = (namespace.to_owned(), service.to_owned(), key.to_owned());
        self.endpoints.set(path, endpoint.clone());
    }

    fn delete_endpoint(&mut self, namespace: &str, service: &str, key: &str) {
        self.endpoints.delete(&(namespace.to_owned(), service.to_owned(), key.to_owned()));
    }

    fn set_node(&mut self, node: &Node) {
        self.nodes.set(node.name.clone(), node.clone());
    }

    fn delete_node(&mut self, name: &str) {
        self.nodes.delete(&name.to_owned());
    }

    fn sync(&mut self) {
        self.nodes.done();
        self.services.done();
        self.endpoints.done();
        let Self { backend, nodes, services, endpoints, has_synced } = self;
        for (_, node) in nodes.created().chain(nodes.updated()) {
            backend.set_node(node);
        }
        for (_, service) in services.created().chain(services.updated()) {
            backend.set_service(service);
        }
        for ((namespace, service, key), it) in endpoints.created().chain(endpoints.updated()) {
            backend.set_endpoint(namespace, service, key, it);
        }
        for ((namespace, service, key), _) in endpoints.deleted().rev() {
            backend.delete_endpoint(namespace, service, key);
        }
        for ((namespace, name), _) in services.deleted().rev() {
            backend.delete_service(namespace, name);
        }
        for (name, _) in nodes.deleted().rev() {
            backend.delete_node(name);
        }
        let is_first = !std::mem::replace(has_synced, true);
        if is_first || nodes.has_changes() || services.has_changes() || endpoints.has_changes() {
            backend.sync();
        }
    }

    fn reset(&mut self) {
        self.nodes.reset();
        self.services.reset();
        self.endpoints.reset();
    }
}
