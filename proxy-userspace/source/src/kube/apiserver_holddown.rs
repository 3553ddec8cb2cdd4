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
            match object {
                Some(object) if is_own(object) => drop(reported.insert(name.clone(), object.clone())),
                // The name belongs to an object of another Service now.
                Some(_) => drop((reported.remove(name), self.active.remove(name))),
                None => drop(reported.remove(name)),
            }
        }
        // Those that become active are added below.
        changes.retain(|name, object| match object {
            Some(object) => !is_own(object),
            None => !previous.contains_key(name),
        });
        if reported != self.reported {
            self.report(reported, is_good, event);
        }
        for name in previous.keys().filter(|it| !self.active.contains_key(*it)) {
            changes.entry(name.clone()).or_insert(None);
        }
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

    type Filter = fn(&mut ApiServerHoldDown, &mut ClusterChanges);

    /// One half of the hold-down, with a good object and what is reported when it turns bad.
    struct Half {
        hold_down: ApiServerHoldDown,
        filter: Filter,
        good: Object,
        bad: Option<Object>,
    }

    impl Half {
        fn new(filter: Filter, good: Object, bad: Option<Object>) -> Self {
            Self { hold_down: ApiServerHoldDown::default(), filter, good, bad }
        }

        fn services() -> Self {
            let service = Service::new(ServiceName::new("default", "kubernetes"));
            Self::new(|it, changes| it.services(changes, None), Object::Service(Arc::new(service)), None)
        }

        fn slices() -> Self {
            let [good, bad] =
                [&["192.0.2.1"] as &[_], &[]].map(|addresses| slice("s", "kubernetes", addresses));
            Self::new(ApiServerHoldDown::slices, good, Some(bad))
        }

        fn both() -> [Self; 2] {
            [Self::services(), Self::slices()]
        }

        /// Returns the changes that take effect.
        fn filter(&mut self, mut changes: ClusterChanges) -> ClusterChanges {
            (self.filter)(&mut self.hold_down, &mut changes);
            changes
        }

        fn report(&mut self, object: Option<Object>) -> ClusterChanges {
            self.filter(HashMap::from([(self.good.name(), object)]))
        }

        fn report_good(&mut self) -> ClusterChanges {
            self.report(Some(self.good.clone()))
        }

        fn report_bad(&mut self) -> ClusterChanges {
            self.report(self.bad.clone())
        }

        fn contact(&mut self) -> ClusterChanges {
            self.filter(HashMap::new())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_endpoint_is_removed_after_the_hold_down_when_the_server_responds() {
        for mut half in Half::both() {
            assert_eq!(half.report_good().len(), 1);
            assert_eq!(half.report_bad().len(), 0);
            tokio::time::advance(HOLD_DOWN / 2).await;
            assert_eq!(half.contact().len(), 0);
            assert_eq!(half.report(None).len(), 0, "a deletion does not restart the hold-down");
            tokio::time::advance(HOLD_DOWN / 2).await;
            // The time alone is not enough: the server must respond.
            let changes = half.contact();
            assert_eq!(changes.values().collect::<Vec<_>>(), [&None]);
            assert_eq!(half.contact().len(), 0);
        }
    }

    /// As after an object that was created and deleted between two reports.
    #[tokio::test(start_paused = true)]
    async fn a_held_deletion_that_is_reported_again_stays_held() {
        for mut half in Half::both() {
            half.report_good();
            for _ in 0..2 {
                assert_eq!(half.report(None).len(), 0);
            }
            tokio::time::advance(HOLD_DOWN).await;
            assert_eq!(half.contact().len(), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slice_that_moves_to_another_service_is_not_deleted() {
        let foreign = slice("s", "web", &["192.0.2.2"]);
        for next in [slice("t", "kubernetes", &["192.0.2.1"]), slice("t", "kubernetes", &[])] {
            let mut half = Half::slices();
            half.report_good();
            let reported: ClusterChanges =
                [&foreign, &next].map(|it| (it.name(), Some(it.clone()))).into_iter().collect();
            assert_eq!(half.filter(reported.clone()), reported);
            tokio::time::advance(HOLD_DOWN).await;
            assert_eq!(half.contact().len(), 0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_hold_down_counts_from_the_first_response_after_an_outage() {
        for mut half in Half::both() {
            half.report_good();
            half.report_bad();
            tokio::time::advance(HOLD_DOWN * 2).await;
            half.hold_down.restart();
            assert_eq!(half.contact().len(), 0);
            tokio::time::advance(HOLD_DOWN / 2).await;
            assert_eq!(half.contact().len(), 0);
            tokio::time::advance(HOLD_DOWN / 2).await;
            assert_eq!(half.contact().len(), 1);
            // Nothing is held down any more.
            half.hold_down.restart();
            assert_eq!(half.report_good().len(), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_returns_during_the_hold_down_changes_nothing() {
        for mut half in Half::both() {
            half.report_good();
            half.report_bad();
            assert_eq!(half.report_good().len(), 0);
            tokio::time::advance(HOLD_DOWN * 2).await;
            assert_eq!(half.contact().len(), 0);
        }
    }

    #[test]
    fn a_cluster_that_starts_without_endpoints_is_accepted() {
        for mut half in Half::both() {
            assert_eq!(half.report_bad().len(), 1);
        }
    }
}
