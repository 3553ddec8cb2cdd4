//! The Service `default/kubernetes`: the API server's own address, which this proxy may be serving to itself.
//!
//! The one rule: that it leads nowhere is believed late.
//! An API server that stops takes itself out of the endpoints first. If that were believed at once, nobody on the node
//! could reach it when it is back at the same address, and nobody would ever hear that it is.
//! So the last endpoints (and the Service itself) stay for [`GRACE`], and then until the server is heard of again and
//! has not said anything else: a server that is alive puts itself back within seconds.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use model::{
    ServiceName,
    cluster::{EndpointSlice, Service, SliceName},
};
use tokio::time::Instant;

use super::kind::{Changed, EndpointSlices, Services};

/// How long an API server may take to come back.
pub(super) const GRACE: Duration = Duration::from_secs(60);

/// EventType is said of the API server's own Service, and what is believed.
#[derive(Debug, Default)]
pub(super) struct ApiServerHoldDown {
    service: HoldDown<Option<Arc<Service>>>,
    slices: HoldDown<BTreeMap<SliceName, Arc<EndpointSlice>>>,
}

fn is_own(name: &ServiceName) -> bool {
    &*name.namespace == "default" && &*name.name == "kubernetes"
}

fn leads_somewhere(slices: &BTreeMap<SliceName, Arc<EndpointSlice>>) -> bool {
    slices.values().any(|it| it.endpoints.iter().any(|it| it.conditions.ready))
}

impl ApiServerHoldDown {
    /// The server has been heard of about Services: takes out of the news what is not believed yet, and puts into them
    /// what is by now.
    pub(super) fn services(&mut self, news: &mut Changed<Services>, server: Option<IpAddr>) {
        if let Some(name) = self.service.believed.as_ref().map(|it| it.name.clone())
            && self.service.contact()
        {
            news.insert(name, None);
        }
        let said = news.iter().find(|(name, _)| is_own(name)).map(|(name, it)| (name.clone(), it.clone()));
        let Some((name, said)) = said else { return };
        if let Some(service) = &said
            && server.is_some_and(|it| service.cluster_ips.contains(&it))
        {
            tracing::warn!(
                "the API server is asked at its Service's address, which this node serves from what the API server \
                 says; give the server's own address by --kube-api-server"
            );
        }
        if !self.service.says(said, Option::is_some, "the Service default/kubernetes is gone") {
            news.remove(&name);
        }
    }

    /// The same about EndpointSlices.
    pub(super) fn slices(&mut self, news: &mut Changed<EndpointSlices>) {
        if self.slices.since.is_some() {
            let before = self.slices.believed.clone();
            if self.slices.contact() {
                news.extend(difference(&before, &self.slices.believed));
            }
        }
        let mut said = self.slices.said.clone();
        for (name, slice) in &*news {
            match slice {
                Some(slice) if is_own(&slice.service) => said.insert(name.clone(), Arc::clone(slice)),
                _ => said.remove(name),
            };
        }
        if said == self.slices.said {
            return;
        }
        let before = self.slices.believed.clone();
        news.retain(|name, slice| {
            let is_own = slice.as_ref().map_or(before.contains_key(name), |it| is_own(&it.service));
            !is_own
        });
        if self.slices.says(said, leads_somewhere, "default/kubernetes has no endpoint any more") {
            news.extend(difference(&before, &self.slices.believed));
        }
    }
}

fn difference(
    before: &BTreeMap<SliceName, Arc<EndpointSlice>>,
    after: &BTreeMap<SliceName, Arc<EndpointSlice>>,
) -> Changed<EndpointSlices> {
    let gone = before.keys().filter(|it| !after.contains_key(*it)).map(|it| (it.clone(), None));
    let new = after.iter().filter(|(name, it)| before.get(*name) != Some(it));
    gone.chain(new.map(|(name, it)| (name.clone(), Some(Arc::clone(it))))).collect()
}

/// Something that is believed as long as it is good, and doubted when it is not.
#[derive(Debug, Default)]
struct HoldDown<T> {
    said: T,
    believed: T,
    /// Since when what is said has been bad, and what is believed good.
    since: Option<Instant>,
}

impl<T: Clone> HoldDown<T> {
    /// Returns whether it is believed.
    fn says(&mut self, said: T, is_good: impl Fn(&T) -> bool, doubt: &str) -> bool {
        self.said = said;
        if is_good(&self.said) || !is_good(&self.believed) {
            self.believed = self.said.clone();
            self.since = None;
            return true;
        }
        if self.since.is_none() {
            let limit = GRACE.as_secs();
            tracing::warn!(
                "{doubt}; that is not believed before {limit} s have passed: it may be the API server's restart"
            );
            self.since = Some(Instant::now());
        }
        false
    }

    /// Returns whether something is believed now that was not before.
    fn contact(&mut self) -> bool {
        if self.since.is_none_or(|since| since.elapsed() < GRACE) {
            return false;
        }
        self.since = None;
        self.believed = self.said.clone();
        tracing::warn!("that nothing stands behind default/kubernetes is believed now");
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::kube_types::{self, objects};

    fn slice(addresses: &[&str]) -> Arc<EndpointSlice> {
        let endpoints: Vec<_> = addresses.iter().map(|it| serde_json::json!({"addresses": [it]})).collect();
        let value = serde_json::json!({
            "metadata": {"name": "s", "labels": {"kubernetes.io/service-name": "kubernetes"}},
            "addressType": "IPv4", "endpoints": endpoints,
        });
        let object: objects::EndpointSlice = serde_json::from_value(value).unwrap();
        Arc::new(kube_types::endpoint_slice(&object).object.unwrap())
    }

    /// Says something, and returns what is news of it.
    fn say(own: &mut ApiServerHoldDown, said: Option<&Arc<EndpointSlice>>) -> Changed<EndpointSlices> {
        let mut news = HashMap::from([(slice(&[]).name.clone(), said.cloned())]);
        own.slices(&mut news);
        news
    }

    fn contact(own: &mut ApiServerHoldDown) -> Changed<EndpointSlices> {
        let mut news = HashMap::new();
        own.slices(&mut news);
        news
    }

    #[tokio::test(start_paused = true)]
    async fn no_endpoints_are_believed_when_a_server_that_is_alive_has_said_so_for_long_enough() {
        let mut own = ApiServerHoldDown::default();
        let (full, empty) = (slice(&["192.0.2.1"]), slice(&[]));
        assert_eq!(say(&mut own, Some(&full)).len(), 1);
        assert_eq!(say(&mut own, Some(&empty)).len(), 0);
        tokio::time::advance(GRACE / 2).await;
        assert_eq!(contact(&mut own).len(), 0);
        assert_eq!(say(&mut own, None).len(), 0, "gone instead of empty begins no new doubt");
        tokio::time::advance(GRACE / 2).await;
        // The time alone is not enough: the server must be heard of.
        let news = contact(&mut own);
        assert_eq!(news.values().collect::<Vec<_>>(), [&None]);
        assert_eq!(contact(&mut own).len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_comes_back_in_time_is_as_if_it_had_never_been_away() {
        let mut own = ApiServerHoldDown::default();
        let (full, empty) = (slice(&["192.0.2.1"]), slice(&[]));
        say(&mut own, Some(&full));
        say(&mut own, Some(&empty));
        assert_eq!(say(&mut own, Some(&full)).len(), 0);
        tokio::time::advance(GRACE * 2).await;
        assert_eq!(contact(&mut own).len(), 0);
    }

    #[test]
    fn a_cluster_that_begins_without_endpoints_is_believed() {
        let mut own = ApiServerHoldDown::default();
        assert_eq!(say(&mut own, Some(&slice(&[]))).len(), 1);
    }
}
