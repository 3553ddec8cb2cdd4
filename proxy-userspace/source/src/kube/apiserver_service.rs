//! The Service `default/kubernetes`: the API server's own address, which this proxy may serve to itself.
//!
//! Invariant: the Service and its last ready endpoints stay until ready ones are reported.
//! An API server that stops removes itself from the endpoints first. If that took effect, nothing on the node could reach it
//! when it is back at the same address, and its return would never be noticed. There is no time limit: a running server adds
//! itself within seconds.

use std::{collections::BTreeMap, net::IpAddr};

use model::{
    ServiceName,
    cluster::{ClusterChanges, Object, ObjectName},
};

type Objects = BTreeMap<ObjectName, Object>;

/// The reported and the active state of the API server's own Service.
#[derive(Debug, Default)]
pub(super) struct ApiServerService {
    service: LastGood,
    slices: LastGood,
}

fn is_apiserver(name: &ServiceName) -> bool {
    &*name.namespace == "default" && &*name.name == "kubernetes"
}

fn has_ready_endpoint(slices: &Objects) -> bool {
    let mut slices = slices.values();
    slices.any(
        |it| matches!(it, Object::EndpointSlice(it) if it.endpoints.iter().any(|it| it.conditions.ready)),
    )
}

impl ApiServerService {
    /// The server has reported changes of Services: removes the deletion of its own from them.
    pub(super) fn services(&mut self, changes: &mut ClusterChanges, server: Option<IpAddr>) {
        let name = ObjectName::Service(ServiceName::new("default", "kubernetes"));
        if let Some(Some(Object::Service(service))) = changes.get(&name)
            && server.is_some_and(|it| service.cluster_ips.contains(&it))
        {
            tracing::warn!(
                "the API server is accessed through the cluster IP of default/kubernetes, which this node serves from \
                 what the API server reports; set --kube-api-server to the server's own address"
            );
        }
        let is_own = |it: &Object| matches!(it, Object::Service(it) if is_apiserver(&it.name));
        let event = "the Service default/kubernetes has been deleted";
        self.service.filter(changes, is_own, |it| !it.is_empty(), event);
    }

    /// The server has reported changes of EndpointSlices: keeps the last ready endpoints of its own until it reports others.
    ///
    /// A new slice without ready endpoints becomes active beside them, and then stays as it is until there are ready ones.
    pub(super) fn slices(&mut self, changes: &mut ClusterChanges) {
        let is_own = |it: &Object| matches!(it, Object::EndpointSlice(it) if is_apiserver(&it.service));
        self.slices.filter(changes, is_own, has_ready_endpoint, "default/kubernetes has no endpoint left");
    }
}

/// Objects that become active while they are good together, or nothing better is active.
#[derive(Debug, Default)]
struct LastGood {
    reported: Objects,
    active: Objects,
}

impl LastGood {
    /// Replaces the changes of its own objects by those of the active ones, which are the last good ones.
    fn filter(
        &mut self,
        changes: &mut ClusterChanges,
        is_own: impl Fn(&Object) -> bool,
        is_good: impl Fn(&Objects) -> bool,
        event: &str,
    ) {
        let previous = self.active.clone();
        let was_good = is_good(&self.reported);
        for (name, object) in &*changes {
            match object {
                Some(object) if is_own(object) => {
                    self.reported.insert(name.clone(), object.clone());
                    // The name may have belonged to an object of another Service until now.
                    self.active.entry(name.clone()).or_insert_with(|| object.clone());
                }
                // The name belongs to an object of another Service now.
                Some(_) => drop((self.reported.remove(name), self.active.remove(name))),
                None => drop(self.reported.remove(name)),
            }
        }
        // Those that become active are added below.
        changes.retain(|name, object| match object {
            Some(object) => !is_own(object),
            None => !previous.contains_key(name),
        });
        if is_good(&self.reported) || !is_good(&self.active) {
            self.active = self.reported.clone();
        } else if was_good {
            tracing::warn!(
                event,
                "the API server may be restarting: its last endpoints stay active until it reports others"
            );
        }
        for name in previous.keys().filter(|it| !self.active.contains_key(*it)) {
            changes.entry(name.clone()).or_insert(None);
        }
        let changed = self.active.iter().filter(|(name, it)| previous.get(*name) != Some(it));
        changes.extend(changed.map(|(name, it)| (name.clone(), Some(it.clone()))));
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, sync::Arc};

    use model::cluster::Service;

    use super::*;
    use crate::kube_types::{self, objects};

    fn slice(name: &str, service: &str, addresses: &[&str]) -> Object {
        let endpoints: Vec<_> = addresses.iter().map(|it| serde_json::json!({"addresses": [it]})).collect();
        let value = serde_json::json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4", "endpoints": endpoints,
        });
        let object: objects::EndpointSlice = serde_json::from_value(value).unwrap();
        Object::EndpointSlice(Arc::new(kube_types::endpoint_slice(&object).object.unwrap()))
    }

    type Filter = fn(&mut ApiServerService, &mut ClusterChanges);

    #[test]
    fn a_cluster_may_start_without_good_objects_and_the_last_ones_stay_until_others_are_reported() {
        let service = Service::new(ServiceName::new("default", "kubernetes"));
        let [good, bad] = [&["192.0.2.1"] as &[_], &[]].map(|it| slice("s", "kubernetes", it));
        // The filter, a good object, and what is reported when it turns bad.
        let kinds: [(Filter, Object, Option<Object>); 2] = [
            (|it, changes| it.services(changes, None), Object::Service(Arc::new(service)), None),
            (ApiServerService::slices, good, Some(bad)),
        ];
        for (filter, good, bad) in kinds {
            let mut own = ApiServerService::default();
            let mut report = |object: Option<&Object>| {
                let mut changes = HashMap::from([(good.name(), object.cloned())]);
                filter(&mut own, &mut changes);
                changes.len()
            };
            assert_eq!(report(bad.as_ref()), 1);
            assert_eq!(report(Some(&good)), 1);
            // The second deletion is that of an object that was created and deleted between two reports.
            for it in [bad.as_ref(), None, None, Some(&good)] {
                assert_eq!(report(it), 0);
            }
        }
    }

    #[test]
    fn a_slice_that_moves_to_or_from_another_service_does_so_at_once() {
        let report = |own: &mut ApiServerService, slices: &[&Object]| {
            let reported: ClusterChanges = slices.iter().map(|&it| (it.name(), Some(it.clone()))).collect();
            let mut changes = reported.clone();
            own.slices(&mut changes);
            (changes, reported)
        };
        let good = slice("s", "kubernetes", &["192.0.2.1"]);
        let foreign = slice("s", "web", &["192.0.2.2"]);
        let empty = slice("t", "kubernetes", &[]);
        for next in [&slice("t", "kubernetes", &["192.0.2.1"]), &empty] {
            let mut own = ApiServerService::default();
            report(&mut own, &[&good]);
            let (changes, reported) = report(&mut own, &[&foreign, next]);
            assert_eq!(changes, reported);
        }
        // One that comes while the last endpoints are kept.
        let mut own = ApiServerService::default();
        report(&mut own, &[&good]);
        assert_eq!(report(&mut own, &[&slice("s", "kubernetes", &[])]).0.len(), 0);
        let (changes, reported) = report(&mut own, &[&empty]);
        assert_eq!(changes, reported);
    }
}
