//! Builds a state from events, and keeps track of what changed.
//!
//! The cost is that of the changes, whatever the size of the state. A value that was changed back has not changed.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    state::{Change, Edits, Values, WithEndpoints, put},
    view::{Event, View},
};
use crate::{
    DiffStore,
    localv1::{Extension, Pod, Revision, ServiceCidr, Set},
};

/// The state of a view while its events arrive.
#[derive(Debug)]
pub(super) struct Tracker<V: View> {
    extensions: Vec<Extension>,
    service_cidrs: Tracked<ServiceCidr>,
    pods: Tracked<Pod>,
    nodes: Tracked<V::Node>,
    services: Tracked<WithEndpoints<V::Service, V::Endpoint>>,
    /// Endpoints without a Service, by Service; a brain that keeps the contract leaves none at a sync.
    orphans: BTreeMap<Arc<str>, Values<V::Endpoint>>,
    /// The extensions of the last difference; `None` before the first one.
    last_extensions: Option<Vec<Extension>>,
}

type Tracked<T> = DiffStore<Arc<str>, Arc<T>>;

/// The difference between two states of a view.
pub(super) type ChangeOf<V> = Change<<V as View>::Node, <V as View>::Service, <V as View>::Endpoint>;

impl<V: View> Default for Tracker<V> {
    fn default() -> Self {
        Self {
            extensions: Vec::new(),
            service_cidrs: DiffStore::new(),
            pods: DiffStore::new(),
            nodes: DiffStore::new(),
            services: DiffStore::new(),
            orphans: BTreeMap::new(),
            last_extensions: None,
        }
    }
}

impl<V: View> Tracker<V> {
    pub(super) fn apply(&mut self, event: Event<V>) {
        match event {
            Event::Reset(extensions) => {
                self.extensions = extensions;
                self.service_cidrs.reset();
                self.pods.reset();
                self.nodes.reset();
                self.services.reset();
                self.orphans.clear();
            }
            Event::Keep(kept) => {
                self.service_cidrs.keep(|it| kept.contains(V::position(Set::ServiceCidrsSet, it)));
                self.pods.keep(|it| kept.contains(V::position(Set::PodsSet, it)));
                self.nodes.keep(|it| kept.contains(V::position(Set::NodesSet, it)));
                self.services.keep(|it| kept.contains(V::position(Set::ServicesSet, it)));
            }
            Event::ServiceCidr(name, it) => self.service_cidrs.put(name, it.map(Arc::new)),
            Event::Pod(name, it) => self.pods.put(name, it.map(Arc::new)),
            Event::Node(name, it) => self.nodes.put(name, it.map(Arc::new)),
            Event::Service(name, Some(service)) => {
                let endpoints = match self.services.get(&name) {
                    Some(it) => it.endpoints.clone(),
                    None => self.orphans.remove(&name).unwrap_or_default(),
                };
                self.services.set(name, Arc::new(WithEndpoints { service, endpoints }));
            }
            Event::Service(name, None) => {
                if let Some(it) = self.services.get(&name).filter(|it| !it.endpoints.is_empty()) {
                    self.orphans.insert(Arc::clone(&name), it.endpoints.clone());
                }
                self.services.delete(&name);
            }
            Event::Endpoint(service, key, endpoint) => {
                let endpoints = match self.services.get_mut(&service) {
                    Some(it) => Some(&mut Arc::make_mut(it).endpoints),
                    None if endpoint.is_none() => self.orphans.get_mut(&service),
                    None => Some(self.orphans.entry(service).or_default()),
                };
                if let Some(endpoints) = endpoints {
                    put(endpoints, key, endpoint.map(Arc::new));
                }
            }
            Event::Sync(_) => {}
        }
    }

    /// The difference to the last call; `None` if there is none, except for the first call.
    pub(super) fn finish(&mut self, revision: Option<Revision>) -> Option<ChangeOf<V>> {
        let change = Change {
            revision,
            extensions: self.extensions.clone(),
            service_cidrs: edits(&mut self.service_cidrs),
            pods: edits(&mut self.pods),
            nodes: edits(&mut self.nodes),
            services: edits(&mut self.services),
        };
        let before = self.last_extensions.replace(self.extensions.clone());
        (change.has_edits() || before.as_ref() != Some(&self.extensions)).then_some(change)
    }
}

/// The changes since the last call.
fn edits<T: PartialEq>(tracked: &mut Tracked<T>) -> Edits<T> {
    tracked.done();
    let set = tracked.created().chain(tracked.updated()).map(|(name, it)| (name, Some(Arc::clone(it))));
    let all = set.chain(tracked.deleted().map(|(name, _)| (name, None)));
    all.map(|(name, value)| (Arc::clone(name), value)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*};

    use super::*;
    use crate::{
        client::{node_view::NodeView, state::State},
        localv1::{Endpoint, Node, Service},
    };

    /// Services with a type, endpoints of a Service with a host name, nodes with a flag.
    fn event() -> impl Strategy<Value = Event<NodeView>> {
        let name = || (0..3_u8).prop_map(|it| Arc::<str>::from(format!("a/{it}")));
        let value = || (0..2_u8).prop_map(|it| it.to_string());
        let service = |r#type| Service { r#type, ..Service::default() };
        let endpoint = |hostname| Endpoint { hostname, ..Endpoint::default() };
        let node = |is_being_deleted| Node { is_being_deleted, ..Node::default() };
        let cidr = |cidr| ServiceCidr { cidrs: vec![cidr], ..ServiceCidr::default() };
        let pod = |uid| Pod { uid, ..Pod::default() };
        prop_oneof![
            1 => Just(()).prop_map(|()| Event::Reset(Vec::new())),
            6 => (name(), option::weighted(0.7, value().prop_map(service)))
                .prop_map(|(it, value)| Event::Service(it, value)),
            6 => (name(), name(), option::weighted(0.7, value().prop_map(endpoint)))
                .prop_map(|(of, it, value)| Event::Endpoint(of, it, value)),
            2 => (name(), option::of(any::<bool>().prop_map(node)))
                .prop_map(|(it, value)| Event::Node(it, value)),
            2 => (name(), option::of(value().prop_map(cidr)))
                .prop_map(|(it, value)| Event::ServiceCidr(it, value)),
            2 => (name(), option::of(value().prop_map(pod))).prop_map(|(it, value)| Event::Pod(it, value)),
            3 => Just(()).prop_map(|()| Event::Sync(None)),
        ]
    }

    /// The model's own function: it must not share the one under test.
    fn edit<V>(values: &mut BTreeMap<Arc<str>, V>, name: Arc<str>, value: Option<V>) {
        values.remove(&name);
        values.extend(value.map(|it| (name, it)));
    }

    #[derive(Default)]
    struct Naive {
        service_cidrs: Values<ServiceCidr>,
        pods: Values<Pod>,
        nodes: Values<Node>,
        services: BTreeMap<Arc<str>, Service>,
        endpoints: BTreeMap<Arc<str>, Values<Endpoint>>,
    }

    impl Naive {
        fn apply(&mut self, event: Event<NodeView>) {
            match event {
                Event::Reset(_) => *self = Self::default(),
                Event::Service(it, value) => edit(&mut self.services, it, value),
                Event::Endpoint(of, it, value) => {
                    edit(self.endpoints.entry(of).or_default(), it, value.map(Arc::new));
                }
                Event::ServiceCidr(it, value) => edit(&mut self.service_cidrs, it, value.map(Arc::new)),
                Event::Pod(it, value) => edit(&mut self.pods, it, value.map(Arc::new)),
                Event::Node(it, value) => edit(&mut self.nodes, it, value.map(Arc::new)),
                Event::Keep(_) | Event::Sync(_) => {}
            }
        }

        fn state(&self) -> State {
            let services = self.services.iter().map(|(name, service)| {
                let endpoints = self.endpoints.get(name).cloned().unwrap_or_default();
                (Arc::clone(name), Arc::new(WithEndpoints { service: service.clone(), endpoints }))
            });
            State {
                service_cidrs: self.service_cidrs.clone(),
                pods: self.pods.clone(),
                nodes: self.nodes.clone(),
                services: services.collect(),
                ..State::default()
            }
        }
    }

    #[test]
    fn a_deletion_of_an_unknown_endpoint_leaves_nothing() {
        let mut tracker = Tracker::<NodeView>::default();
        tracker.apply(Event::Endpoint("a/0".into(), "b".into(), None));
        assert!(tracker.orphans.is_empty());
    }

    proptest! {
        #[test]
        fn differences_lead_from_state_to_state(events in vec(event(), 0..60)) {
            let (mut tracker, mut naive, mut state) = (Tracker::<NodeView>::default(), Naive::default(), None::<State>);
            for event in events {
                if !matches!(event, Event::Sync(_)) {
                    tracker.apply(event.clone());
                    naive.apply(event);
                    continue;
                }
                let before = state.clone();
                match tracker.finish(None) {
                    None => prop_assert!(before.is_some(), "the first state is returned even if it is empty"),
                    Some(change) => {
                        state.get_or_insert_default().apply(change);
                        prop_assert!(state != before, "an empty difference is not returned");
                    }
                }
                let (before, state) = (before.unwrap_or_default(), state.clone().unwrap_or_default());
                prop_assert_eq!(&state, &naive.state());
                for (name, it) in &state.services {
                    if let Some(old) = before.services.get(name).filter(|old| *old == it) {
                        prop_assert!(Arc::ptr_eq(old, it), "equal values are shared");
                    }
                }
            }
        }
    }
}
