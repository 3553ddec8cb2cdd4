//! The state of a node from one message after the other.
//!
//! The one rule: only what changed is decoded, and what is refused is said once.

use std::{collections::BTreeMap, sync::Arc};

use model::{
    ServiceName,
    cluster::Rejected,
    state::{NodeState, ServiceState},
};
use proxy_contract::{
    client::{NodeChange, ServiceEndpoints, State},
    localv1,
};

use crate::{decode::Reader, node, service_path, service_state};

/// Messages to state. A copy of the state that it hands out is cheap, and so is its difference from the one before.
#[derive(Debug, Default)]
pub struct NodeStateDecoder {
    state: NodeState,
    /// The Services by their paths, those that are not served among them.
    services: BTreeMap<Arc<str>, Known>,
    /// What of the nodes was refused.
    nodes: BTreeMap<Arc<str>, Vec<Rejected>>,
}

/// What a message said.
#[derive(Debug)]
struct Known {
    /// None if it is not to be served.
    name: Option<ServiceName>,
    rejected: Vec<Rejected>,
}

impl NodeStateDecoder {
    /// The state that follows on the one before; says in the log what of the change was refused, if it has not said so
    /// before. It costs what changes.
    pub fn apply(&mut self, change: &NodeChange) -> NodeState {
        self.take_nodes(&change.nodes);
        let mut served = Vec::new();
        for (path, message) in &change.services {
            let before = self.services.remove(path);
            let mut name = None;
            if let Some(message) = message {
                let (state, rejected) = decode(path, message);
                tell(&rejected, before.as_ref().map(|it| it.rejected.as_slice()));
                name = state.as_ref().map(|it| it.service.name.clone());
                self.services.insert(Arc::clone(path), Known { name: name.clone(), rejected });
                served.extend(state.map(Arc::new));
            }
            if name.is_none()
                && let Some(gone) = before.and_then(|it| it.name)
            {
                self.state.services.remove(&gone);
            }
        }
        if self.state.services.is_empty() {
            // The first time it is nearly all there is.
            self.state.services = served.into_iter().collect();
        } else {
            for state in served {
                self.state.services.insert(state);
            }
        }
        self.state.clone()
    }

    /// The state that one message is; what it does not name is gone.
    pub fn decode(&mut self, state: &State) -> NodeState {
        let mut change = NodeChange::default();
        let gone = self.services.keys().filter(|it| !state.services.contains_key(*it));
        change.services.extend(gone.map(|it| (Arc::clone(it), None)));
        change
            .services
            .extend(state.services.iter().map(|(path, it)| (Arc::clone(path), Some(Arc::clone(it)))));
        let gone = self.state.nodes.keys().filter(|it| !state.nodes.contains_key(*it));
        change.nodes.extend(gone.map(|it| (Arc::clone(it), None)));
        change.nodes.extend(state.nodes.iter().map(|(name, it)| (Arc::clone(name), Some(Arc::clone(it)))));
        self.apply(&change)
    }

    fn take_nodes(&mut self, nodes: &BTreeMap<Arc<str>, Option<Arc<localv1::Node>>>) {
        for (name, message) in nodes {
            let before = self.nodes.remove(name);
            let Some(message) = message else {
                self.state.nodes.remove(name);
                continue;
            };
            let mut reader = Reader::new(format!("node {name}"));
            let node =
                node::read(&mut reader, &message.addresses, &message.pod_cidrs, message.is_being_deleted);
            let rejected = reader.into_rejected();
            tell(&rejected, before.as_deref());
            if !rejected.is_empty() {
                self.nodes.insert(Arc::clone(name), rejected);
            }
            if self.state.nodes.get(name) != Some(&node) {
                self.state.nodes.insert(Arc::clone(name), node);
            }
        }
    }
}

/// What a message says of a Service, which is filed under its namespace and name.
fn decode(path: &str, message: &ServiceEndpoints) -> (Option<ServiceState>, Vec<Rejected>) {
    let endpoints = message.endpoints.iter().map(|(key, it)| (&**key, &**it));
    let decoded = service_state(&message.service, endpoints);
    let (state, mut rejected) = (decoded.value, decoded.rejected);
    let state = state.filter(|it| {
        let own = service_path(&it.service.name);
        if own != path {
            let mut reader = Reader::new(format!("service {path}"));
            reader.refuse("name", format!("it is that of {own}; the peer should file it there"));
            rejected.extend(reader.into_rejected());
        }
        own == path
    });
    (state, rejected)
}

/// Says what is refused, unless it was before.
fn tell(rejected: &[Rejected], before: Option<&[Rejected]>) {
    for it in rejected.iter().filter(|it| before.is_none_or(|before| !before.contains(it))) {
        tracing::warn!("not taken over from the brain: {it}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(namespace: &str, name: &str, ip: &str) -> Arc<ServiceEndpoints> {
        let cluster_ips = Some(localv1::IpSet { v4: vec![ip.to_owned()], v6: Vec::new() });
        let ips = localv1::ServiceIPs { cluster_ips, ..Default::default() };
        let service = localv1::Service {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ips: Some(ips),
            ..Default::default()
        };
        Arc::new(ServiceEndpoints { service, ..Default::default() })
    }

    fn change(services: &[(&str, Option<Arc<ServiceEndpoints>>)]) -> NodeChange {
        let services = services.iter().map(|(path, it)| ((*path).into(), it.clone()));
        NodeChange { services: services.collect(), ..NodeChange::default() }
    }

    fn names(state: &NodeState) -> Vec<String> {
        state.services.keys().map(ToString::to_string).collect()
    }

    #[test]
    fn a_change_touches_what_it_names_and_nothing_else() {
        let mut decoder = NodeStateDecoder::default();
        let first = decoder.apply(&change(&[
            ("a/x", Some(message("a", "x", "10.96.0.1"))),
            ("a/y", Some(message("a", "y", "10.96.0.2"))),
        ]));
        assert_eq!(names(&first), ["a/x", "a/y"]);
        let second = decoder.apply(&change(&[
            ("a/x", None),
            ("a/z", Some(message("a", "z", "10.96.0.3"))),
            ("a/no", None),
        ]));
        assert_eq!(names(&second), ["a/y", "a/z"]);
        let name = ServiceName::new("a", "y");
        assert!(Arc::ptr_eq(&first.services[&name], &second.services[&name]));
        assert_eq!(names(&first), ["a/x", "a/y"], "a state that was handed out stays what it was");
    }

    #[test]
    fn what_is_not_to_be_served_any_more_goes() {
        let mut decoder = NodeStateDecoder::default();
        decoder.apply(&change(&[("a/x", Some(message("a", "x", "10.96.0.1")))]));
        let refused = decoder.apply(&change(&[("a/x", Some(message("a", "x", "nowhere")))]));
        assert_eq!(names(&refused), [""; 0]);
        let again = decoder.apply(&change(&[("a/x", Some(message("a", "x", "10.96.0.1")))]));
        assert_eq!(names(&again), ["a/x"]);
    }

    #[test]
    fn a_service_under_the_path_of_another_is_refused() {
        let mut decoder = NodeStateDecoder::default();
        let state = decoder.apply(&change(&[
            ("a/x", Some(message("a", "x", "10.96.0.1"))),
            ("b/x", Some(message("a", "x", "10.96.0.2"))),
        ]));
        assert_eq!(names(&state), ["a/x"]);
        assert_eq!(decoder.services["b/x"].rejected.len(), 1);
        assert_eq!(
            state.services[&ServiceName::new("a", "x")].service.cluster_ips[0].to_string(),
            "10.96.0.1"
        );
        assert_eq!(names(&decoder.apply(&change(&[("b/x", None)]))), ["a/x"]);
    }

    #[test]
    fn a_whole_state_takes_away_what_it_does_not_name() {
        let mut decoder = NodeStateDecoder::default();
        decoder.apply(&change(&[("a/x", Some(message("a", "x", "10.96.0.1")))]));
        let mut whole = State::default();
        whole.services.insert("a/y".into(), message("a", "y", "10.96.0.2"));
        whole.nodes.insert("n".into(), Arc::default());
        let state = decoder.decode(&whole);
        assert_eq!((names(&state), state.nodes.len()), (vec!["a/y".to_owned()], 1));
        assert_eq!(decoder.decode(&State::default()), NodeState::default());
    }
}
