//! Hold-down of the Service `default/kubernetes`: the API server's own address, which this proxy may serve to itself.
//!
//! Invariant: the removal of its last endpoint takes effect late.
//! An API server that stops removes itself from the endpoints first. If that took effect at once, nothing on the node could
//! reach it when it is back at the same address, and its return would never be noticed. So the last endpoints (and the
//! Service itself) stay for [`HOLD_DOWN`], counted again from the first response after an outage: a running server adds
//! itself within seconds.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use model::{
    ServiceName,
    cluster::{ClusterChanges, EndpointSlice, Object, ObjectName, Service},
};
use tokio::time::Instant;

/// Longer than an API server takes to stop: it withdraws its endpoint first, and then keeps watches open for 60 s.
pub(super) const HOLD_DOWN: Duration = Duration::from_secs(120);

type Slices = BTreeMap<ObjectName, Arc<EndpointSlice>>;

/// The reported and the active state of the API server's own Service.
#[derive(Debug, Default)]
pub(super) struct ApiServerHoldDown {
    service: HoldDown<Option<Arc<Service>>>,
    slices: HoldDown<Slices>,
}

fn is_apiserver(name: &ServiceName) -> bool {
    &*name.namespace == "default" && &*name.name == "kubernetes"
}

fn has_ready_endpoint(slices: &Slices) -> bool {
    slices.values().any(|it| it.endpoints.iter().any(|it| it.conditions.ready))
}

impl ApiServerHoldDown {
    /// The server responds again after an outage: it may not have added itself yet.
    pub(super) fn restart(&mut self) {
        self.service.restart();
        self.slices.restart();
    }

    /// The server has responded about Services: removes a held-down deletion from the changes, and adds one whose
    /// hold-down has ended.
    pub(super) fn services(&mut self, changes: &mut ClusterChanges, server: Option<IpAddr>) {
        let name = ObjectName::Service(ServiceName::new("default", "kubernetes"));
        if self.service.active.is_some() && self.service.contact() {
            changes.insert(name.clone(), None);
        }
        let Some(change) = changes.get(&name) else { return };
        let reported = match change {
            Some(Object::Service(service)) => Some(Arc::clone(service)),
            _ => None,
        };
        if let Some(service) = &reported
            && server.is_some_and(|it| service.cluster_ips.contains(&it))
        {
            tracing::warn!(
                "the API server is accessed through the cluster IP of default/kubernetes, which this node serves from \
                 what the API server reports; set --kube-api-server to the server's own address"
            );
        }
        if !self.service.report(reported, Option::is_some, "the Service default/kubernetes has been deleted")
        {
            changes.remove(&name);
        }
    }

    /// The same for EndpointSlices.
    pub(super) fn slices(&mut self, changes: &mut ClusterChanges) {
        if self.slices.held_since.is_some() {
            let previous = self.slices.active.clone();
            if self.slices.contact() {
                changes.extend(difference(&previous, &self.slices.active));
            }
        }
        let mut reported = self.slices.reported.clone();
        for (name, slice) in &*changes {
            match slice {
                Some(Object::EndpointSlice(slice)) if is_apiserver(&slice.service) => {
                    reported.insert(name.clone(), Arc::clone(slice))
                }
                _ => reported.remove(name),
            };
        }
        if reported == self.slices.reported {
            return;
        }
        let previous = self.slices.active.clone();
        changes.retain(|name, slice| match slice {
            Some(Object::EndpointSlice(it)) => !is_apiserver(&it.service),
            _ => !previous.contains_key(name),
        });
        if self.slices.report(reported, has_ready_endpoint, "default/kubernetes has no endpoint left") {
            changes.extend(difference(&previous, &self.slices.active));
        }
    }
}

fn difference(previous: &Slices, next: &Slices) -> ClusterChanges {
    let deleted = previous.keys().filter(|it| !next.contains_key(*it)).map(|it| (it.clone(), None));
    let changed = next.iter().filter(|(name, it)| previous.get(*name) != Some(it));
    let object = |it: &Arc<EndpointSlice>| Some(Object::EndpointSlice(Arc::clone(it)));
    deleted.chain(changed.map(|(name, it)| (name.clone(), object(it)))).collect()
}

/// A value that becomes active at once while it is good, and late when it turns bad.
#[derive(Debug, Default)]
struct HoldDown<T> {
    reported: T,
    active: T,
    /// Since when the reported value is bad and the active one good.
    held_since: Option<Instant>,
}

impl<T: Clone> HoldDown<T> {
    /// A new value is reported; returns whether it is active.
    fn report(&mut self, reported: T, is_good: impl Fn(&T) -> bool, event: &str) -> bool {
        self.reported = reported;
        if is_good(&self.reported) || !is_good(&self.active) {
            self.active = self.reported.clone();
            self.held_since = None;
            return true;
        }
        if self.held_since.is_none() {
            tracing::warn!(
                event,
                hold_down_seconds = HOLD_DOWN.as_secs(),
                "the API server may be restarting: its last endpoints stay active until it has responded for the hold-down"
            );
            self.held_since = Some(Instant::now());
        }
        false
    }

    /// Counts from now on, if something is held down.
    fn restart(&mut self) {
        self.held_since = self.held_since.map(|_| Instant::now());
    }

    /// The server has responded; returns whether the hold-down has ended and the reported value is active now.
    fn contact(&mut self) -> bool {
        if self.held_since.is_none_or(|since| since.elapsed() < HOLD_DOWN) {
            return false;
        }
        self.held_since = None;
        self.active = self.reported.clone();
        tracing::warn!(
            service = "default/kubernetes",
            "there is no endpoint after the hold-down; the last ones are removed now"
        );
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::kube_types::{self, objects};

    fn slice(addresses: &[&str]) -> Object {
        let endpoints: Vec<_> = addresses.iter().map(|it| serde_json::json!({"addresses": [it]})).collect();
        let value = serde_json::json!({
            "metadata": {"name": "s", "labels": {"kubernetes.io/service-name": "kubernetes"}},
            "addressType": "IPv4", "endpoints": endpoints,
        });
        let object: objects::EndpointSlice = serde_json::from_value(value).unwrap();
        Object::EndpointSlice(Arc::new(kube_types::endpoint_slice(&object).object.unwrap()))
    }

    /// Reports a slice, and returns the changes that take effect.
    fn report(hold_down: &mut ApiServerHoldDown, slice_now: Option<&Object>) -> ClusterChanges {
        let mut changes = HashMap::from([(slice(&[]).name(), slice_now.cloned())]);
        hold_down.slices(&mut changes);
        changes
    }

    fn contact(hold_down: &mut ApiServerHoldDown) -> ClusterChanges {
        let mut changes = HashMap::new();
        hold_down.slices(&mut changes);
        changes
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_endpoint_is_removed_after_the_hold_down_when_the_server_responds() {
        let mut hold_down = ApiServerHoldDown::default();
        let (full, empty) = (slice(&["192.0.2.1"]), slice(&[]));
        assert_eq!(report(&mut hold_down, Some(&full)).len(), 1);
        assert_eq!(report(&mut hold_down, Some(&empty)).len(), 0);
        tokio::time::advance(HOLD_DOWN / 2).await;
        assert_eq!(contact(&mut hold_down).len(), 0);
        assert_eq!(report(&mut hold_down, None).len(), 0, "a deletion does not restart the hold-down");
        tokio::time::advance(HOLD_DOWN / 2).await;
        // The time alone is not enough: the server must respond.
        let changes = contact(&mut hold_down);
        assert_eq!(changes.values().collect::<Vec<_>>(), [&None]);
        assert_eq!(contact(&mut hold_down).len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_hold_down_counts_from_the_first_response_after_an_outage() {
        let mut hold_down = ApiServerHoldDown::default();
        let (full, empty) = (slice(&["192.0.2.1"]), slice(&[]));
        report(&mut hold_down, Some(&full));
        report(&mut hold_down, Some(&empty));
        tokio::time::advance(HOLD_DOWN * 2).await;
        hold_down.restart();
        assert_eq!(contact(&mut hold_down).len(), 0);
        tokio::time::advance(HOLD_DOWN / 2).await;
        assert_eq!(contact(&mut hold_down).len(), 0);
        tokio::time::advance(HOLD_DOWN / 2).await;
        assert_eq!(contact(&mut hold_down).len(), 1);
        // Nothing is held down any more.
        hold_down.restart();
        assert_eq!(report(&mut hold_down, Some(&full)).len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_returns_during_the_hold_down_changes_nothing() {
        let mut hold_down = ApiServerHoldDown::default();
        let (full, empty) = (slice(&["192.0.2.1"]), slice(&[]));
        report(&mut hold_down, Some(&full));
        report(&mut hold_down, Some(&empty));
        assert_eq!(report(&mut hold_down, Some(&full)).len(), 0);
        tokio::time::advance(HOLD_DOWN * 2).await;
        assert_eq!(contact(&mut hold_down).len(), 0);
    }

    #[test]
    fn a_cluster_that_starts_without_endpoints_is_accepted() {
        let mut hold_down = ApiServerHoldDown::default();
        assert_eq!(report(&mut hold_down, Some(&slice(&[]))).len(), 1);
    }
}
