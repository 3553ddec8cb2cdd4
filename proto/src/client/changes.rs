//! What is other than before, change by change.
//!
//! The one rule: it costs what changed, whatever is there besides; and what came back to what it was has not changed.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    Client, ServiceEndpoints,
    local::{Event, Local},
    session::Session,
};
use crate::localv1::{Endpoint, Extension, Node, Revision};

/// What differs between two states of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeChange {
    /// What tells the later state from others, if the brain says so: KPNG's does not.
    pub revision: Option<Revision>,
    /// What the brain says beyond KPNG's API, of what the client wanted: what is not among them is not said.
    pub extensions: Vec<Extension>,
    /// The nodes that are new or others than before, by name; `None` for those that are gone.
    pub nodes: BTreeMap<Arc<str>, Option<Arc<Node>>>,
    /// The Services that are new or others than before, or have other endpoints, by `namespace/name`; `None` for those
    /// that are gone.
    pub services: BTreeMap<Arc<str>, Option<Arc<ServiceEndpoints>>>,
}

/// Follows the changes of a node's state: what [`Client::changes`] returns.
#[derive(Debug)]
pub struct ChangeWatch {
    session: Session<Local>,
    building: Building,
}

/// A state in the making.
#[derive(Debug, Default)]
struct Building {
    extensions: Vec<Extension>,
    nodes: Tracked<Node>,
    services: Tracked<ServiceEndpoints>,
    /// Endpoints without a Service; there are none at a sync if the brain keeps the rules.
    orphans: BTreeMap<String, BTreeMap<Arc<str>, Arc<Endpoint>>>,
    /// What was granted with the last change; `None` before the first.
    told: Option<Vec<Extension>>,
}

/// Values by name, and what became of them since the last change was handed out.
#[derive(Debug)]
struct Tracked<T> {
    now: BTreeMap<Arc<str>, Arc<T>>,
    /// What those were that have been touched since; `None` if they were not there.
    before: BTreeMap<Arc<str>, Option<Arc<T>>>,
}

impl ChangeWatch {
    pub(super) fn new(client: &Client) -> Self {
        Self { session: Session::new(client, Local::new(client)), building: Building::default() }
    }

    /// Waits for a state that differs from the one before, and tells how: the first time from nothing. Several changes
    /// while nobody waits are one.
    ///
    /// It is never `None`: no error and no outage is the end. Nothing is lost if it is dropped while it waits.
    pub async fn next(&mut self) -> Option<NodeChange> {
        loop {
            let event = self.session.next().await;
            let Event::Sync(revision) = event else {
                self.building.take_in(event);
                continue;
            };
            if let Some(change) = self.building.finish(revision) {
                return Some(change);
            }
        }
    }
}

impl Building {
    fn take_in(&mut self, event: Event) {
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

    /// What differs from the last time, unless it is nothing.
    fn finish(&mut self, revision: Option<Revision>) -> Option<NodeChange> {
        let (nodes, services) = (self.nodes.finish(), self.services.finish());
        if nodes.is_empty() && services.is_empty() && self.told.as_ref() == Some(&self.extensions) {
            return None;
        }
        self.told = Some(self.extensions.clone());
        Some(NodeChange { revision, extensions: self.extensions.clone(), nodes, services })
    }
}

impl<T> Default for Tracked<T> {
    fn default() -> Self {
        Self { now: BTreeMap::new(), before: BTreeMap::new() }
    }
}

impl<T: PartialEq> Tracked<T> {
    /// Keeps what a value was, unless it has been touched already.
    fn touch(&mut self, name: &str) {
        if !self.before.contains_key(name) {
            let (name, value) = match self.now.get_key_value(name) {
                Some((name, it)) => (Arc::clone(name), Some(Arc::clone(it))),
                None => (name.into(), None),
            };
            self.before.insert(name, value);
        }
    }

    fn set(&mut self, name: &str, value: Arc<T>) {
        self.touch(name);
        self.now.insert(name.into(), value);
    }

    fn delete(&mut self, name: &str) -> Option<Arc<T>> {
        self.touch(name);
        self.now.remove(name)
    }

    /// A value that is there, to be changed.
    fn get_mut(&mut self, name: &str) -> Option<&mut Arc<T>> {
        if self.now.contains_key(name) {
            self.touch(name);
        }
        self.now.get_mut(name)
    }

    /// A value to be changed, there or not.
    fn get_or_default(&mut self, name: &str) -> &mut Arc<T>
    where
        T: Default,
    {
        self.touch(name);
        self.now.entry(name.into()).or_default()
    }

    /// Takes everything away.
    fn clear(&mut self) {
        for (name, value) in std::mem::take(&mut self.now) {
            self.before.entry(name).or_insert(Some(value));
        }
    }

    /// What is other than it was, from where on the next difference counts.
    fn finish(&mut self) -> BTreeMap<Arc<str>, Option<Arc<T>>> {
        let mut changed = BTreeMap::new();
        for (name, before) in std::mem::take(&mut self.before) {
            match (self.now.get_mut(&name), before) {
                (None, None) => {}
                // The one of before is shared with whoever has been given it.
                (Some(now), Some(before)) if *now == before => *now = before,
                (now, _) => drop(changed.insert(name, now.cloned())),
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::{client::State, localv1::Service};

    /// What a brain may say between two syncs; a Service `name` with its type, an endpoint with its pod's name.
    #[derive(Clone, Debug)]
    enum Saying {
        Reset,
        Service(u8, u8),
        NoService(u8),
        Endpoint(u8, u8, u8),
        NoEndpoint(u8, u8),
        Node(u8, bool),
        NoNode(u8),
        Sync,
    }

    fn saying() -> impl Strategy<Value = Saying> {
        let (name, value) = (0..3_u8, 0..2_u8);
        prop_oneof![
            1 => Just(Saying::Reset),
            4 => (name.clone(), value.clone()).prop_map(|(it, value)| Saying::Service(it, value)),
            2 => name.clone().prop_map(Saying::NoService),
            4 => (name.clone(), name.clone(), value).prop_map(|(of, it, value)| Saying::Endpoint(of, it, value)),
            2 => (name.clone(), name.clone()).prop_map(|(of, it)| Saying::NoEndpoint(of, it)),
            1 => (name.clone(), any::<bool>()).prop_map(|(it, value)| Saying::Node(it, value)),
            1 => name.prop_map(Saying::NoNode),
            3 => Just(Saying::Sync),
        ]
    }

    fn event(saying: &Saying) -> Event {
        let path = |it: u8| format!("a/{it}");
        match *saying {
            Saying::Reset => Event::Reset(Vec::new()),
            Saying::Service(it, value) => {
                Event::SetService(path(it), Service { r#type: value.to_string(), ..Service::default() })
            }
            Saying::NoService(it) => Event::DeleteService(path(it)),
            Saying::Endpoint(of, it, value) => {
                let endpoint = Endpoint { hostname: value.to_string(), ..Endpoint::default() };
                Event::SetEndpoint(path(of), it.to_string(), endpoint)
            }
            Saying::NoEndpoint(of, it) => Event::DeleteEndpoint(path(of), it.to_string()),
            Saying::Node(it, value) => {
                Event::SetNode(it.to_string(), Node { is_being_deleted: value, ..Node::default() })
            }
            Saying::NoNode(it) => Event::DeleteNode(it.to_string()),
            Saying::Sync => Event::Sync(None),
        }
    }

    /// What was said, word for word.
    #[derive(Default)]
    struct Plain {
        nodes: BTreeMap<u8, bool>,
        services: BTreeMap<u8, u8>,
        endpoints: BTreeMap<(u8, u8), u8>,
    }

    impl Plain {
        fn take_in(&mut self, saying: &Saying) {
            match *saying {
                Saying::Reset => *self = Self::default(),
                Saying::Service(it, value) => drop(self.services.insert(it, value)),
                Saying::NoService(it) => drop(self.services.remove(&it)),
                Saying::Endpoint(of, it, value) => drop(self.endpoints.insert((of, it), value)),
                Saying::NoEndpoint(of, it) => drop(self.endpoints.remove(&(of, it))),
                Saying::Node(it, value) => drop(self.nodes.insert(it, value)),
                Saying::NoNode(it) => drop(self.nodes.remove(&it)),
                Saying::Sync => {}
            }
        }

        fn state(&self) -> State {
            let mut building = Building::default();
            let nodes = self.nodes.iter().map(|(it, value)| Saying::Node(*it, *value));
            let services = self.services.iter().map(|(it, value)| Saying::Service(*it, *value));
            let served = self.endpoints.iter().filter(|((of, _), _)| self.services.contains_key(of));
            let endpoints = served.map(|((of, it), value)| Saying::Endpoint(*of, *it, *value));
            nodes.chain(services).chain(endpoints).for_each(|it| building.take_in(event(&it)));
            let (nodes, services) = (building.nodes.now, building.services.now);
            State { nodes, services, ..State::default() }
        }
    }

    proptest! {
        #[test]
        fn changes_lead_from_state_to_state(sayings in vec(saying(), 0..60)) {
            let (mut building, mut plain, mut state) = (Building::default(), Plain::default(), None::<State>);
            for saying in &sayings {
                if !matches!(saying, Saying::Sync) {
                    building.take_in(event(saying));
                    plain.take_in(saying);
                    continue;
                }
                let before = state.clone();
                match building.finish(None) {
                    None => prop_assert!(before.is_some(), "the first state is told, though it is empty"),
                    Some(change) => {
                        let is_empty = change.nodes.is_empty() && change.services.is_empty();
                        prop_assert!(!is_empty || before.is_none(), "nothing was told as a change");
                        state.get_or_insert_default().apply(change);
                    }
                }
                let (before, state) = (before.unwrap_or_default(), state.clone().unwrap_or_default());
                prop_assert_eq!(&state, &plain.state());
                for (name, it) in &state.services {
                    if let Some(old) = before.services.get(name).filter(|old| *old == it) {
                        prop_assert!(Arc::ptr_eq(old, it), "what is equal is shared");
                    }
                }
            }
        }
    }
}
