//! Decodes the state of a node, change by change.
//!
//! Invariant: only what changed is decoded, and a rejection is logged once.
//! The state comes from another brain: conflicts between its Services are resolved here again.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::{
    NameForm, Rejections, RequestedMetadata, ServiceName,
    conflicts::{Claim, FrontendOwners, remove_conflicting},
    state::{NodeInfo, NodeState, ServiceState},
};
use proxy_contract::{
    client::{NodeChange, ServiceEndpoints},
    localv1,
};

use crate::{
    decode::service_state,
    encode::service_path,
    node::{decode_pod, decode_service_cidr, node_info},
    reader::{Decoded, Reader, apply_kind},
};

/// Decodes messages to a state. Copies of the state are cheap, and so are diffs between them.
#[derive(Debug, Default)]
pub struct NodeStateDecoder {
    requested: RequestedMetadata,
    state: NodeState,
    /// The Services by their paths, before conflicts are resolved; none if it is not served.
    services: BTreeMap<Arc<str>, Option<Arc<ServiceState>>>,
    owners: FrontendOwners,
    /// The rejected parts of the messages, and the frontends that Services lost to others.
    rejections: Rejections,
}

impl NodeStateDecoder {
    /// A decoder that keeps the requested labels and annotations of Services; the default one keeps none.
    pub fn new(requested: RequestedMetadata) -> Self {
        Self { requested, ..Self::default() }
    }

    /// Applies a change and returns the state after it; logs what is rejected, unless it was before.
    ///
    /// The cost is proportional to the change.
    pub fn apply(&mut self, change: &NodeChange) -> NodeState {
        let before = self.rejections.clone();
        let (state, rejections) = (&mut self.state, &mut self.rejections);
        apply_kind(&change.nodes, "node", rejections, decode_node, |name, it| {
            if state.nodes.get(name) != it.as_ref() {
                replace(&mut state.nodes, name, it);
            }
        });
        let cidrs = &change.service_cidrs;
        apply_kind(cidrs, "ServiceCIDR", rejections, decode_service_cidr, |name, it| {
            replace(&mut state.service_cidrs, name, it.map(Arc::new));
        });
        apply_kind(&change.pods, "pod", rejections, decode_pod, |name, it| {
            replace(&mut state.pods, name, it.map(Arc::new));
        });
        let affected = self.apply_services(&change.services);
        let is_first = self.state.services.is_empty();
        let mut served = Vec::new();
        for name in affected {
            match self.resolve(&name) {
                Some(state) => served.push(state),
                None => drop(self.state.services.remove(&name)),
            }
        }
        if is_first {
            // Building the map at once is cheaper than single inserts.
            self.state.services = served.into_iter().collect();
        } else {
            for state in served {
                self.state.services.insert(state);
            }
        }
        for it in self.rejections.new_since(&before) {
            tracing::warn!(item = it.item, error = it.reason, "ignored in the state of the peer");
        }
        self.state.clone()
    }

    /// Decodes what was sent of Services; returns the names of those for which something else is to be served.
    fn apply_services(
        &mut self,
        changes: &BTreeMap<Arc<str>, Option<Arc<ServiceEndpoints>>>,
    ) -> BTreeSet<ServiceName> {
        let mut affected = BTreeSet::new();
        for (path, message) in changes {
            let decoded = message.as_ref().map(|it| decode(path, it, &self.requested));
            let Decoded { value, rejected } = decoded.unwrap_or_default();
            self.rejections.set(&format!("service {path}"), rejected);
            let before = self.services.remove(path).flatten();
            let state = value.map(Arc::new);
            let after = if state == before { before.clone() } else { state };
            if let Some(it) = after.as_ref().or(before.as_ref()) {
                let name = &it.service.name;
                let claim = after.as_ref().map(|it| Claim::new(&it.service, None)).unwrap_or_default();
                self.owners.set(name, claim);
                affected.insert(name.clone());
            }
            if message.is_some() {
                self.services.insert(Arc::clone(path), after);
            }
        }
        affected.extend(self.owners.take_changed());
        affected
    }

    /// A Service without the frontends that another one owns; none if it is not served.
    fn resolve(&mut self, name: &ServiceName) -> Option<Arc<ServiceState>> {
        self.rejections.set(&format!("conflicts of {name}"), self.owners.rejected_of(name));
        let mut state = self.services.get(service_path(name).as_str())?.clone()?;
        if let Some(conflicting) = self.owners.conflicting(name) {
            remove_conflicting(Arc::make_mut(&mut Arc::make_mut(&mut state).service), conflicting);
        }
        Some(state)
    }
}

/// Adds, replaces or removes an object that the states of all nodes share.
fn replace<T: Clone>(all: &mut Arc<BTreeMap<Arc<str>, T>>, name: &Arc<str>, value: Option<T>) {
    let all = Arc::make_mut(all);
    match value {
        Some(it) => drop(all.insert(Arc::clone(name), it)),
        None => drop(all.remove(name)),
    }
}

fn decode_node(name: &Arc<str>, message: &localv1::Node) -> Decoded<Option<NodeInfo>> {
    let mut reader = Reader::new(&format!("node {name}"));
    let is_named = reader.accepts("name", name, NameForm::DnsSubdomain);
    let info = node_info(&mut reader, &message.addresses, &message.pod_cidrs, message.is_being_deleted);
    reader.finish(is_named.then_some(info))
}

/// The state of a Service; none if its path is not its own.
fn decode(
    path: &str,
    message: &ServiceEndpoints,
    requested: &RequestedMetadata,
) -> Decoded<Option<ServiceState>> {
    let endpoints = message.endpoints.iter().map(|(key, it)| (&**key, &**it));
    let Decoded { value, mut rejected } = service_state(&message.service, endpoints, requested);
    let own = value.as_ref().map(|it| service_path(&it.service.name));
    let value = match own {
        Some(own) if own != path => {
            let mut reader = Reader::new(&format!("service {path}"));
            reader.reject("name", format!("the path must be that of the Service, {own}"));
            rejected.extend(reader.finish(()).rejected);
            None
        }
        _ => value,
    };
    Decoded { value, rejected }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read as _};

    use model::state::ServiceCidr;

    use super::*;

    /// The items whose rejection is logged meanwhile.
    fn logged(act: impl FnOnce()) -> Vec<String> {
        // With a second subscriber, other threads ask all of them whether to log, and not only their own.
        let _other = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
        // A few lines fit into a pipe.
        let (mut written, writer) = io::pipe().unwrap();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(writer)).finish();
        tracing::subscriber::with_default(subscriber, act);
        let mut text = String::new();
        written.read_to_string(&mut text).unwrap();
        let items = text.lines().filter_map(|it| it.split_once("ignored in the state of the peer item=\""));
        items.map(|(_, it)| it.split('"').next().unwrap().to_owned()).collect()
    }

    fn message(namespace: &str, name: &str, ip: &str) -> Arc<ServiceEndpoints> {
        let cluster_ips = Some(localv1::IpSet::of([ip]));
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
    fn a_change_affects_only_what_it_contains_and_a_service_that_becomes_invalid_is_removed() {
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
        assert_eq!(names(&first), ["a/x", "a/y"], "a returned state does not change");
        for (ip, expect) in [("nowhere", &["a/z"][..]), ("10.96.0.2", &["a/y", "a/z"])] {
            assert_eq!(names(&decoder.apply(&change(&[("a/y", Some(message("a", "y", ip)))]))), expect);
        }
    }

    #[test]
    fn a_service_under_the_path_of_another_is_rejected() {
        let mut decoder = NodeStateDecoder::default();
        let state = decoder.apply(&change(&[
            ("a/x", Some(message("a", "x", "10.96.0.1"))),
            ("b/x", Some(message("a", "x", "10.96.0.2"))),
        ]));
        assert_eq!(names(&state), ["a/x"]);
        let rejected: Vec<_> = decoder.rejections.iter().map(|it| &it.item).collect();
        assert!(matches!(rejected[..], [it] if it.contains("b/x")), "{rejected:?}");
        let service = &state.services[&ServiceName::new("a", "x")].service;
        assert_eq!(service.cluster_ips[0].to_string(), "10.96.0.1");
        assert_eq!(names(&decoder.apply(&change(&[("b/x", None)]))), ["a/x"]);
    }

    #[test]
    fn objects_of_every_kind_come_as_their_messages_say_and_go() {
        let mut decoder = NodeStateDecoder::default();
        let info = NodeInfo {
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            pod_cidrs: vec!["10.1.0.0/24".parse().unwrap()],
            is_being_deleted: true,
        };
        let cidr = ServiceCidr { name: "c".into(), cidrs: vec!["10.96.0.0/16".parse().unwrap()] };
        let (node, mut service_cidr) = (crate::node("n", &info), crate::service_cidr(&cidr));
        assert_eq!((node.name.as_str(), service_cidr.name.as_str()), ("n", "c"));
        service_cidr.cidrs.push("nowhere".into());
        let pod = Arc::new(localv1::Pod { uid: "u".into(), socket_lb: 1, ..Default::default() });
        let state = decoder.apply(&NodeChange {
            // A node without a valid name is ignored.
            nodes: [("n".into(), Some(Arc::new(node))), ("A b".into(), Some(Arc::default()))].into(),
            service_cidrs: [("c".into(), Some(Arc::new(service_cidr)))].into(),
            pods: [("a/p".into(), Some(pod))].into(),
            ..change(&[("a/y", Some(message("a", "y", "10.96.0.2")))])
        });
        assert_eq!(state.pods.keys().map(|it| &**it).collect::<Vec<_>>(), ["a/p"]);
        assert_eq!(*state.service_cidrs["c"], cidr);
        assert!(state.nodes.iter().map(|(name, it)| (&**name, it)).eq([("n", &info)]));
        assert_eq!(names(&state), ["a/y"]);
        let state = decoder.apply(&NodeChange {
            nodes: [("n".into(), None)].into(),
            service_cidrs: [("c".into(), None)].into(),
            pods: [("a/p".into(), None)].into(),
            ..change(&[("a/y", None)])
        });
        assert_eq!(state, NodeState::default());
    }

    #[test]
    fn conflicts_are_resolved_by_name_reported_and_logged_once() {
        let mut decoder = NodeStateDecoder::default();
        let port = localv1::PortMapping { port: 80, node_port: 30080, protocol: 1, ..Default::default() };
        let with_port = |name: &str, is_local| {
            let mut message = ServiceEndpoints::clone(&message("a", name, "10.96.0.1"));
            message.service.ports = vec![port.clone()];
            message.service.internal_traffic_to_local = is_local;
            Some(Arc::new(message))
        };
        let frontends = |state: &NodeState, name: &str| {
            let port = &state.services[&ServiceName::new("a", name)].service.ports[0];
            (port.conflicting_addresses.len(), port.node_port.is_some())
        };
        let mut state = decoder.apply(&change(&[("a/y", with_port("y", false))]));
        assert_eq!(frontends(&state, "y"), (0, true));
        let items = logged(|| state = decoder.apply(&change(&[("a/x", with_port("x", false))])));
        assert_eq!(items.len(), 2, "{items:?}");
        assert_eq!((frontends(&state, "x"), frontends(&state, "y")), ((0, true), (1, false)));
        let lost: Vec<_> = decoder.rejections.iter().map(|it| it.item.split(':').next().unwrap()).collect();
        assert_eq!(lost, ["Service a/y"; 2]);
        let other = change(&[("a/y", with_port("y", true))]);
        assert_eq!(logged(|| drop(decoder.apply(&other))), [""; 0]);
        let state = decoder.apply(&change(&[("a/x", None)]));
        assert_eq!(frontends(&state, "y"), (0, true));
        assert!(decoder.rejections.is_empty());
    }

    #[test]
    fn a_rejection_is_logged_once() {
        let mut decoder = NodeStateDecoder::default();
        let node = |addresses: &[&str], pod_cidr: &str| {
            let addresses = addresses.iter().map(ToString::to_string).collect();
            let node = localv1::Node { addresses, pod_cidrs: vec![pod_cidr.into()], ..Default::default() };
            Some(Arc::new(node))
        };
        let service_cidr = |cidrs: &[&str]| {
            let cidrs = cidrs.iter().map(ToString::to_string).collect();
            Some(Arc::new(localv1::ServiceCidr { cidrs, ..Default::default() }))
        };
        let pod =
            |socket_lb| Some(Arc::new(localv1::Pod { uid: "u".into(), socket_lb, ..Default::default() }));
        let service = |external_ip: &str| {
            let mut message = ServiceEndpoints::clone(&message("a", "x", "10.96.0.1"));
            let ips = message.service.ips.as_mut().unwrap();
            ips.external_ips = Some(localv1::IpSet::of([external_ip]));
            Some(Arc::new(message))
        };
        let mut change = |node, cidr, pod, service| {
            let change = NodeChange {
                nodes: BTreeMap::from([("n".into(), node)]),
                service_cidrs: BTreeMap::from([("c".into(), cidr)]),
                pods: BTreeMap::from([("a/p".into(), pod)]),
                services: BTreeMap::from([("a/x".into(), service)]),
                ..NodeChange::default()
            };
            logged(|| drop(decoder.apply(&change)))
        };
        let first = (node(&["nowhere"], "10.1.0.0/24"), service_cidr(&["nowhere"]), service("nowhere"));
        let all =
            ["ServiceCIDR c: cidrs", "node n: addresses", "pod a/p: socket_lb", "service a/x: external_ips"];
        // A value of a later version.
        assert_eq!(change(first.0.clone(), first.1.clone(), pod(99), first.2.clone()), all);
        let same =
            (node(&["nowhere", "10.0.0.1"], "10.1.0.0/24"), service_cidr(&["nowhere", "10.96.0.0/12"]));
        assert_eq!(
            change(same.0.clone(), same.1.clone(), pod(99), first.2.clone()),
            [""; 0],
            "logged before"
        );
        let more = change(node(&["nowhere"], "nowhere"), same.1, pod(1), first.2.clone());
        assert_eq!(more, ["node n: pod_cidrs"], "what is new");
        assert_eq!(change(None, None, None, None), [""; 0]);
        assert_eq!(change(first.0, first.1, pod(99), first.2), all, "they are new again");
    }
}
