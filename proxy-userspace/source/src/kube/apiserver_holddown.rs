//! Hold-down of the Service `default/kubernetes`: the API server's own address, which this proxy may serve to itself.
//!
//! Invariant: the removal of its last endpoint takes effect late.
//! An API server that stops removes itself from the endpoints first. If that took effect at once, nothing on the node could
//! reach it when it is back at the same address, and its return would never be noticed. So the last endpoints (and the
//! Service itself) stay for [`HOLD_DOWN`], counted again from the first response after an outage: a running server adds
//! itself within seconds.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use model::{
    ServiceName,
    cluster::{ClusterChanges, Object, ObjectName},
};
use tokio::time::Instant;

/// Longer than an API server takes to stop: it withdraws its endpoint first, and then keeps watches open for 60 s.
pub(super) const HOLD_DOWN: Duration = Duration::from_secs(120);

type Objects = BTreeMap<ObjectName, Object>;

/// The reported and the active state of the API server's own Service.
#[derive(Debug, Default)]
pub(super) struct ApiServerHoldDown {
    service: HoldDown,
    slices: HoldDown,
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

    /// The same for EndpointSlices.
    pub(super) fn slices(&mut self, changes: &mut ClusterChanges) {
        let is_own = |it: &Object| matches!(it, Object::EndpointSlice(it) if is_apiserver(&it.service));
        self.slices.filter(changes, is_own, has_ready_endpoint, "default/kubernetes has no endpoint left");
    }
}

/// Objects that become active at once while they are good, and late when they turn bad.
#[derive(Debug, Default)]
struct HoldDown {
    reported: Objects,
    active: Objects,
    /// Since when the reported ones are bad and the active ones good.
    held_since: Option<Instant>,
}

impl HoldDown {
    /// The server has responded: replaces changes of its own objects by those of the active ones.
    fn filter(
        &mut self,
        changes: &mut ClusterChanges,
        is_own: impl Fn(&Object) -> bool,
        is_good: impl Fn(&Objects) -> bool,
        event: &str,
    ) {
        let previous = self.active.clone();
        self.contact();
        let mut reported = self.reported.clone();
        for (name, object) in &*changes {
            match object.as_ref().filter(|it| is_own(it)) {
                Some(object) => reported.insert(name.clone(), object.clone()),
                None => reported.remove(name),
            };
        }
        if reported != self.reported {
            changes.retain(|name, object| match object {
                Some(object) => !is_own(object),
                None => !previous.contains_key(name),
            });
            self.report(reported, is_good, event);
        }
        let deleted = previous.keys().filter(|it| !self.active.contains_key(*it));
        changes.extend(deleted.map(|it| (it.clone(), None)));
        let changed = self.active.iter().filter(|(name, it)| previous.get(*name) != Some(it));
        changes.extend(changed.map(|(name, it)| (name.clone(), Some(it.clone()))));
    }

    /// Other objects are reported.
    fn report(&mut self, reported: Objects, is_good: impl Fn(&Objects) -> bool, event: &str) {
        self.reported = reported;
        if is_good(&self.reported) || !is_good(&self.active) {
            self.active = self.reported.clone();
            self.held_since = None;
        } else if self.held_since.is_none() {
            tracing::warn!(
                event,
                hold_down_seconds = HOLD_DOWN.as_secs(),
                "the API server may be restarting: its last endpoints stay active until it has responded for the hold-down"
            );
            self.held_since = Some(Instant::now());
        }
    }

    /// Counts from now on, if something is held down.
    fn restart(&mut self) {
        self.held_since = self.held_since.map(|_| Instant::now());
    }

    /// The server has responded: what is reported becomes active at the end of the hold-down.
    fn contact(&mut self) {
        if self.held_since.take_if(|since| since.elapsed() >= HOLD_DOWN).is_some() {
            self.active = self.reported.clone();
            tracing::warn!(
                service = "default/kubernetes",
                "there is no endpoint after the hold-down; the last ones are removed now"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, sync::Arc};

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
