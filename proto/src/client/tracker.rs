//! Builds a state from events, and keeps track of what changed.
//!
//! The cost is that of the changes, whatever the size of the state. A value that was changed back has not changed.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    session::{Event, View},
    state::{Difference, Edits, Values, WithEndpoints},
};
use crate::localv1::Extension;

/// The state of a view while its events arrive.
#[derive(Debug)]
pub(super) struct Tracker<V: View> {
    extensions: Vec<Extension>,
    nodes: Tracked<V::Node>,
    services: Tracked<WithEndpoints<V::Service, V::Endpoint>>,
    /// Endpoints without a Service, by Service; a brain that keeps the contract leaves none at a sync.
    orphans: BTreeMap<String, Values<V::Endpoint>>,
    /// The extensions of the last difference; `None` before the first one.
    last_extensions: Option<Vec<Extension>>,
}

/// Values by name, and their changes since the last difference.
#[derive(Debug)]
struct Tracked<T> {
    current: Values<T>,
    /// The previous values of those that were touched since; `None` if there was none.
    previous: Edits<T>,
}

impl<V: View> Default for Tracker<V> {
    fn default() -> Self {
        Self {
            extensions: Vec::new(),
            nodes: Tracked::default(),
            services: Tracked::default(),
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
                self.nodes.clear();
                self.services.clear();
                self.orphans.clear();
            }
            Event::SetNode(name, node) => self.nodes.set(&name, Arc::new(node)),
            Event::DeleteNode(name) => drop(self.nodes.delete(&name)),
            Event::SetService(name, service) => {
                let orphans = self.orphans.remove(&name);
                let it = Arc::make_mut(self.services.get_or_default(&name));
                it.service = service;
                it.endpoints.extend(orphans.into_iter().flatten());
            }
            Event::DeleteService(name) => {
                if let Some(it) = self.services.delete(&name).filter(|it| !it.endpoints.is_empty()) {
                    self.orphans.insert(name, it.endpoints.clone());
                }
            }
            Event::SetEndpoint(service, key, endpoint) => {
                let endpoints = match self.services.get_mut(&service) {
                    Some(it) => &mut Arc::make_mut(it).endpoints,
                    None => self.orphans.entry(service).or_default(),
                };
                endpoints.insert(key.into(), Arc::new(endpoint));
            }
            Event::DeleteEndpoint(service, key) => {
                if let Some(it) = self.services.get_mut(&service) {
                    Arc::make_mut(it).endpoints.remove(key.as_str());
                } else if let Some(it) = self.orphans.get_mut(&service) {
                    it.remove(key.as_str());
                }
            }
            Event::Sync(_) => {}
        }
    }

    /// The difference to the last call; `None` if there is none, except for the first call.
    pub(super) fn finish(&mut self) -> Option<Difference<V::Node, V::Service, V::Endpoint>> {
        let (nodes, services) = (self.nodes.finish(), self.services.finish());
        if nodes.is_empty() && services.is_empty() && self.last_extensions.as_ref() == Some(&self.extensions)
        {
            return None;
        }
        self.last_extensions = Some(self.extensions.clone());
        Some(Difference { extensions: self.extensions.clone(), nodes, services })
    }
}

impl<T> Default for Tracked<T> {
    fn default() -> Self {
        Self { current: BTreeMap::new(), previous: BTreeMap::new() }
    }
}

impl<T: PartialEq> Tracked<T> {
    /// Keeps the previous value, unless it was touched before.
    fn touch(&mut self, name: &str) {
        if !self.previous.contains_key(name) {
            let (name, value) = match self.current.get_key_value(name) {
                Some((name, it)) => (Arc::clone(name), Some(Arc::clone(it))),
                None => (name.into(), None),
            };
            self.previous.insert(name, value);
        }
    }

    fn set(&mut self, name: &str, value: Arc<T>) {
        self.touch(name);
        self.current.insert(name.into(), value);
    }

    fn delete(&mut self, name: &str) -> Option<Arc<T>> {
        self.touch(name);
        self.current.remove(name)
    }

    /// An existing value, to be changed.
    fn get_mut(&mut self, name: &str) -> Option<&mut Arc<T>> {
        if self.current.contains_key(name) {
            self.touch(name);
        }
        self.current.get_mut(name)
    }

    /// A value to be changed; inserted if missing.
    fn get_or_default(&mut self, name: &str) -> &mut Arc<T>
    where
        T: Default,
    {
        self.touch(name);
        self.current.entry(name.into()).or_default()
    }

    fn clear(&mut self) {
        for (name, value) in std::mem::take(&mut self.current) {
            self.previous.entry(name).or_insert(Some(value));
        }
    }

    /// The changes since the last call.
    fn finish(&mut self) -> Edits<T> {
        let mut edits = BTreeMap::new();
        for (name, previous) in std::mem::take(&mut self.previous) {
            match (self.current.get_mut(&name), previous) {
                (None, None) => {}
                // Equal values share the pointer that callers already have.
                (Some(current), Some(previous)) if *current == previous => *current = previous,
                (current, _) => drop(edits.insert(name, current.cloned())),
            }
        }
        edits
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::{
        client::{
            node_view::NodeView,
            state::{NodeChange, State},
        },
        localv1::{Endpoint, Node, Service},
    };

    /// An operation of a brain: Services with a type, endpoints of a Service with a host name, nodes with a flag.
    #[derive(Clone, Debug)]
    enum Step {
        Reset,
        Service(u8, u8),
        DeleteService(u8),
        Endpoint(u8, u8, u8),
        DeleteEndpoint(u8, u8),
        Node(u8, bool),
        DeleteNode(u8),
        Sync,
    }

    fn step() -> impl Strategy<Value = Step> {
        let (name, value) = (0..3_u8, 0..2_u8);
        prop_oneof![
            1 => Just(Step::Reset),
            4 => (name.clone(), value.clone()).prop_map(|(it, value)| Step::Service(it, value)),
            2 => name.clone().prop_map(Step::DeleteService),
            4 => (name.clone(), name.clone(), value).prop_map(|(of, it, value)| Step::Endpoint(of, it, value)),
            2 => (name.clone(), name.clone()).prop_map(|(of, it)| Step::DeleteEndpoint(of, it)),
            1 => (name.clone(), any::<bool>()).prop_map(|(it, value)| Step::Node(it, value)),
            1 => name.prop_map(Step::DeleteNode),
            3 => Just(Step::Sync),
        ]
    }

    fn event(step: &Step) -> Event<NodeView> {
        let path = |it: u8| format!("a/{it}");
        match *step {
            Step::Reset => Event::Reset(Vec::new()),
            Step::Service(it, value) => {
                Event::SetService(path(it), Service { r#type: value.to_string(), ..Service::default() })
            }
            Step::DeleteService(it) => Event::DeleteService(path(it)),
            Step::Endpoint(of, it, value) => {
                let endpoint = Endpoint { hostname: value.to_string(), ..Endpoint::default() };
                Event::SetEndpoint(path(of), it.to_string(), endpoint)
            }
            Step::DeleteEndpoint(of, it) => Event::DeleteEndpoint(path(of), it.to_string()),
            Step::Node(it, value) => {
                Event::SetNode(it.to_string(), Node { is_being_deleted: value, ..Node::default() })
            }
            Step::DeleteNode(it) => Event::DeleteNode(it.to_string()),
            Step::Sync => Event::Sync(None),
        }
    }

    /// A naive model.
    #[derive(Default)]
    struct Naive {
        nodes: BTreeMap<u8, bool>,
        services: BTreeMap<u8, u8>,
        endpoints: BTreeMap<(u8, u8), u8>,
    }

    impl Naive {
        fn apply(&mut self, step: &Step) {
            match *step {
                Step::Reset => *self = Self::default(),
                Step::Service(it, value) => drop(self.services.insert(it, value)),
                Step::DeleteService(it) => drop(self.services.remove(&it)),
                Step::Endpoint(of, it, value) => drop(self.endpoints.insert((of, it), value)),
                Step::DeleteEndpoint(of, it) => drop(self.endpoints.remove(&(of, it))),
                Step::Node(it, value) => drop(self.nodes.insert(it, value)),
                Step::DeleteNode(it) => drop(self.nodes.remove(&it)),
                Step::Sync => {}
            }
        }

        fn state(&self) -> State {
            let mut tracker = Tracker::<NodeView>::default();
            let nodes = self.nodes.iter().map(|(it, value)| Step::Node(*it, *value));
            let services = self.services.iter().map(|(it, value)| Step::Service(*it, *value));
            let served = self.endpoints.iter().filter(|((of, _), _)| self.services.contains_key(of));
            let endpoints = served.map(|((of, it), value)| Step::Endpoint(*of, *it, *value));
            nodes.chain(services).chain(endpoints).for_each(|it| tracker.apply(event(&it)));
            let (nodes, services) = (tracker.nodes.current, tracker.services.current);
            State { nodes, services, ..State::default() }
        }
    }

    proptest! {
        #[test]
        fn differences_lead_from_state_to_state(steps in vec(step(), 0..60)) {
            let (mut tracker, mut naive, mut state) = (Tracker::<NodeView>::default(), Naive::default(), None::<State>);
            for step in &steps {
                if !matches!(step, Step::Sync) {
                    tracker.apply(event(step));
                    naive.apply(step);
                    continue;
                }
                let before = state.clone();
                match tracker.finish() {
                    None => prop_assert!(before.is_some(), "the first state is returned even if it is empty"),
                    Some(Difference { extensions, nodes, services }) => {
                        let is_empty = nodes.is_empty() && services.is_empty();
                        prop_assert!(!is_empty || before.is_none(), "an empty difference is not returned");
                        let change = NodeChange { revision: None, extensions, nodes, services };
                        state.get_or_insert_default().apply(change);
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
