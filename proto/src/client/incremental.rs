//! One call for every change.
//!
//! The one rule: an endpoint is never there without its Service.
//! Services are set before their endpoints, and deleted after them.

use std::convert::Infallible;

use super::{
    Client,
    local::{Event, Local},
    session::Session,
};
use crate::{
    DiffStore,
    localv1::{Endpoint, Node, Service},
};

/// A backend that is told of every change.
///
/// The calls come in change sets, each of which ends with [`sync`](Self::sync): what is there then is a state, and what
/// is there in between is not. A call must not block for long, as the connection waits for it.
pub trait Incremental {
    /// A Service is new, or another than before.
    fn set_service(&mut self, service: &Service);
    /// A Service is gone; its endpoints are gone already.
    fn delete_service(&mut self, namespace: &str, name: &str);
    /// An endpoint of a Service is new, or another than before; within the Service, it is called `key`.
    fn set_endpoint(&mut self, namespace: &str, service: &str, key: &str, endpoint: &Endpoint);
    /// An endpoint is gone.
    fn delete_endpoint(&mut self, namespace: &str, service: &str, key: &str);
    /// A node of the cluster is new, or another than before; for a client that wants `Nodes`, of a brain that says them.
    fn set_node(&mut self, _node: &Node) {}
    /// A node of the cluster is gone.
    fn delete_node(&mut self, _name: &str) {}
    /// The change set is complete.
    fn sync(&mut self);
    /// What was said so far is void, and all of it is said again: a new connection. What was in force may stay so until
    /// the next [`sync`](Self::sync).
    fn reset(&mut self);
}

pub(super) async fn run(client: &Client, backend: &mut impl Incremental) -> Infallible {
    let mut session = Session::new(client, Local::new(client));
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

/// A backend that remembers what was sent: it turns a [`reset`](Incremental::reset) into a minimal difference.
///
/// Nothing is passed on before a change set is complete. Then come, in this order, the Services and the endpoints that
/// are new or others than before, and the endpoints and the Services that are gone: after a reset, those that were not
/// sent again. A change set without any change is not passed on at all, except for the first.
///
/// ```no_run
/// # use proxy_contract::{client::{Client, Incremental, ResetFilter}, Target};
/// # async fn example(target: Target, backend: impl Incremental) {
/// // `backend.reset()` is never called, and a restart of the brain that changes nothing makes no call at all.
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
    /// Passes on to `backend` what changes.
    pub fn new(backend: B) -> Self {
        let (nodes, services, endpoints) = Default::default();
        Self { backend, nodes, services, endpoints, has_synced: false }
    }

    /// The backend.
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
        let backend = &mut self.backend;
        let mut changed = !self.has_synced;
        for (_, node) in self.nodes.created().chain(self.nodes.updated()) {
            backend.set_node(node);
            changed = true;
        }
        for (_, service) in self.services.created().chain(self.services.updated()) {
            backend.set_service(service);
            changed = true;
        }
        for ((namespace, service, key), it) in self.endpoints.created().chain(self.endpoints.updated()) {
            backend.set_endpoint(namespace, service, key, it);
            changed = true;
        }
        for ((namespace, service, key), _) in self.endpoints.deleted().rev() {
            backend.delete_endpoint(namespace, service, key);
            changed = true;
        }
        for ((namespace, name), _) in self.services.deleted().rev() {
            backend.delete_service(namespace, name);
            changed = true;
        }
        for (name, _) in self.nodes.deleted().rev() {
            backend.delete_node(name);
            changed = true;
        }
        self.has_synced = true;
        if changed {
            backend.sync();
        }
    }

    fn reset(&mut self) {
        self.nodes.reset();
        self.services.reset();
        self.endpoints.reset();
    }
}
