//! One callback per change.
//!
//! Invariant: an endpoint never exists without its Service.
//! Services are set before their endpoints and deleted after them.

use std::{convert::Infallible, sync::Arc};

use super::{
    connect::Connector,
    node_view::NodeView,
    session::{Event, Session},
};
use crate::{
    DiffStore,
    localv1::{Endpoint, Node, Service},
};
#[cfg(feature = "resume")]
use crate::{digest::position, localv1::Set};

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
}

/// Calls the backend at each sync that changes something, and at the first one: for what was added or changed, and then
/// for what was deleted, which after a reset is what was not set again.
pub(super) async fn run(connector: &Connector, backend: &mut impl Incremental) -> Infallible {
    let mut session = Session::<NodeView>::new(connector);
    let mut nodes = DiffStore::<Arc<str>, Node>::new();
    let mut services = DiffStore::<Arc<str>, Service>::new();
    let mut endpoints = DiffStore::<(Arc<str>, Arc<str>), Endpoint>::new();
    let mut is_first = true;
    loop {
        match session.next().await {
            Event::Reset(_) => {
                nodes.reset();
                services.reset();
                endpoints.reset();
            }
            #[cfg(feature = "resume")]
            Event::Keep(kept) => {
                nodes.keep(|it| kept.contains(position(Set::NodesSet, it)));
                services.keep(|it| kept.contains(position(Set::ServicesSet, it)));
                endpoints.keep(|(service, _)| kept.contains(position(Set::ServicesSet, service)));
            }
            Event::SetNode(name, node) => nodes.set(name, node),
            Event::DeleteNode(name) => nodes.delete(&name),
            // Backends without a packet path have no use for them.
            Event::SetServiceCidr(..) | Event::DeleteServiceCidr(_) => {}
            Event::SetService(name, service) => services.set(name, service),
            Event::DeleteService(name) => services.delete(&name),
            Event::SetEndpoint(service, key, endpoint) => endpoints.set((service, key), endpoint),
            Event::DeleteEndpoint(service, key) => endpoints.delete(&(service, key)),
            Event::Sync(_) => {
                nodes.done();
                services.done();
                endpoints.done();
                for (_, node) in nodes.created().chain(nodes.updated()) {
                    backend.set_node(node);
                }
                for (_, service) in services.created().chain(services.updated()) {
                    backend.set_service(service);
                }
                for ((service, key), it) in endpoints.created().chain(endpoints.updated()) {
                    let (namespace, service) = split(service);
                    backend.set_endpoint(namespace, service, key, it);
                }
                for ((service, key), _) in endpoints.deleted().rev() {
                    let (namespace, service) = split(service);
                    backend.delete_endpoint(namespace, service, key);
                }
                for (name, _) in services.deleted().rev() {
                    let (namespace, name) = split(name);
                    backend.delete_service(namespace, name);
                }
                for (name, _) in nodes.deleted().rev() {
                    backend.delete_node(name);
                }
                let has_changes = nodes.has_changes() || services.has_changes() || endpoints.has_changes();
                if std::mem::take(&mut is_first) || has_changes {
                    backend.sync();
                }
            }
        }
    }
}

fn split(service: &str) -> (&str, &str) {
    service.split_once('/').unwrap_or(("", service))
}
