//! The difference between two cluster states.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use model::{
    ServiceName, Timestamp,
    cluster::{ClusterState, Endpoint, EndpointSlice, Node, Service, SliceName},
    state::{Pod, ServiceCidr},
};
use prost::Message as _;
use proxy_contract::{
    digest::{KeptBuckets, position},
    localv1::{Extension, OpItem, Set},
};
use tokio::task::coop::consume_budget;
use wire::{
    Extensions,
    cluster::{
        endpoint_info, endpoints_by_key, is_node_sent, is_service_sent, is_slice_sent, node_info,
        service_info,
    },
};

use super::change_set::{Change, Diff, Encode, Kind, Phase, delete, differing, set};

/// Selects the objects that a client receives.
#[derive(Clone, Copy)]
pub(crate) struct Filter<'a> {
    /// The value of the label `service.kubernetes.io/service-proxy-name` of this proxy's Services.
    pub(crate) proxy_name: Option<&'a str>,
    pub(crate) extensions: Extensions,
}

/// The changed objects, in ascending order of names.
pub(crate) struct ClusterDiff {
    service_cidrs: Vec<Change<Arc<ServiceCidr>>>,
    pods: Vec<Change<Arc<Pod>>>,
    nodes: Vec<Change<Arc<Node>>>,
    services: Vec<Change<SentService>>,
    slices: Vec<SliceChange>,
}

struct SentService {
    service: Arc<Service>,
    /// `None` if the client did not request trigger times.
    trigger_time: Option<Timestamp>,
}

/// A slice before and after, which may have moved to another Service.
#[derive(Default)]
struct SliceChange {
    old: Option<Arc<EndpointSlice>>,
    new: Option<Arc<EndpointSlice>>,
}

impl ClusterDiff {
    /// The difference from `old` to `new`; shared objects are not compared.
    pub(crate) fn new(old: &ClusterState, new: &ClusterState, filter: Filter<'_>) -> Self {
        let nodes = new.nodes.diff(&old.nodes).filter(|(name, ..)| is_node_sent(name));
        let nodes = nodes.map(|(name, old, new)| Change {
            path: format!("|{name}||"),
            old: old.cloned(),
            new: new.cloned(),
        });
        // A slice comes and goes with its Service, whose trigger time is that of its slices.
        let names = new.services.diff(&old.services).map(|(name, ..)| name);
        let owners = new.services_with_changed_slices(old);
        let changed: BTreeSet<_> = names.chain(owners).collect();
        let mut slices = BTreeMap::<&SliceName, SliceChange>::new();
        let services = changed.into_iter().map(|name| {
            for it in filter.slices(old, name) {
                slices.entry(&it.name).or_default().old = Some(Arc::clone(it));
            }
            for it in filter.slices(new, name) {
                slices.entry(&it.name).or_default().new = Some(Arc::clone(it));
            }
            Change {
                path: service_path(name),
                old: filter.service(old, name),
                new: filter.service(new, name),
            }
        });
        let (nodes, services) = (nodes.collect(), services.collect());
        let changed = slices.into_values().filter(|it| match (&it.old, &it.new) {
            (Some(old), Some(new)) => !Arc::ptr_eq(old, new),
            _ => true,
        });
        let [cidrs, pods] = [Extension::ServiceCidrs, Extension::Pods].map(|it| filter.extensions.has(it));
        let cidr_path = |it: &str| format!("|{it}||");
        let service_cidrs = differing(cidrs, &old.service_cidrs, &new.service_cidrs, cidr_path);
        let pod_path = |it: &str| format!("{}||", it.replace('/', "|"));
        let pods = differing(pods, &old.pods, &new.pods, pod_path);
        Self { service_cidrs, pods, nodes, services, slices: changed.collect() }
    }

    /// Leaves out the new objects in these buckets; other tasks run in between.
    pub(crate) async fn without(self, kept: &KeptBuckets) -> Self {
        async fn leave_out<T>(all: Vec<T>, is_kept: impl Fn(&T) -> bool) -> Vec<T> {
            let mut left = Vec::new();
            for it in all {
                consume_budget().await;
                left.extend((!is_kept(&it)).then_some(it));
            }
            left
        }
        fn is_kept<T: Encode>(kept: &KeptBuckets) -> impl Fn(&Change<T>) -> bool {
            move |it: &Change<T>| kept.contains(position(T::SET, &it.path))
        }
        let is_slice_kept = |it: &SliceChange| {
            let path = it.new.as_ref().map(|it| service_path(&it.service));
            path.is_some_and(|it| kept.contains(position(SentService::SET, &it)))
        };
        Self {
            service_cidrs: leave_out(self.service_cidrs, is_kept(kept)).await,
            pods: leave_out(self.pods, is_kept(kept)).await,
            nodes: leave_out(self.nodes, is_kept(kept)).await,
            services: leave_out(self.services, is_kept(kept)).await,
            slices: leave_out(self.slices, is_slice_kept).await,
        }
    }
}

fn service_path(ServiceName { namespace, name }: &ServiceName) -> String {
    format!("{namespace}|{name}||")
}

impl Filter<'_> {
    fn is_sent(&self, service: &Service) -> bool {
        is_service_sent(service, self.proxy_name, self.extensions.has(Extension::OtherProxies))
    }

    /// The Service, if the client receives it.
    fn service(&self, state: &ClusterState, name: &ServiceName) -> Option<SentService> {
        let service = state.services.get(name).filter(|it| self.is_sent(it))?;
        let slices = state.slices_of(name).filter(|it| !it.headless);
        let trigger_time = slices.filter_map(|it| it.trigger_time).max();
        let trigger_time = trigger_time.filter(|_| self.extensions.has(Extension::TriggerTimes));
        Some(SentService { service: Arc::clone(service), trigger_time })
    }

    /// The slices of a Service that the client receives.
    fn slices<'a>(
        &self,
        state: &'a ClusterState,
        name: &ServiceName,
    ) -> impl Iterator<Item = &'a Arc<EndpointSlice>> {
        let is_sent = state.services.get(name).is_some_and(|it| self.is_sent(it));
        state.slices_of(name).filter(move |it| is_sent && is_slice_sent(it))
    }
}

impl Diff for ClusterDiff {
    fn len(&self, kind: Kind) -> usize {
        match kind {
            Kind::ServiceCidrs => self.service_cidrs.len(),
            Kind::Pods => self.pods.len(),
            Kind::Nodes => self.nodes.len(),
            Kind::Services => self.services.len(),
            Kind::Endpoints => self.slices.len(),
        }
    }

    fn operations(&self, phase: Phase, index: usize, out: &mut VecDeque<OpItem>) {
        match phase {
            Phase::Set(Kind::ServiceCidrs) => out.extend(self.service_cidrs[index].set()),
            Phase::Delete(Kind::ServiceCidrs) => out.extend(self.service_cidrs[index].delete()),
            Phase::Set(Kind::Pods) => out.extend(self.pods[index].set()),
            Phase::Delete(Kind::Pods) => out.extend(self.pods[index].delete()),
            Phase::Set(Kind::Nodes) => out.extend(self.nodes[index].set()),
            Phase::Delete(Kind::Nodes) => out.extend(self.nodes[index].delete()),
            Phase::Set(Kind::Services) => out.extend(self.services[index].set()),
            Phase::Delete(Kind::Services) => out.extend(self.services[index].delete()),
            Phase::Set(Kind::Endpoints) => self.slices[index].set_endpoints(out),
            Phase::Delete(Kind::Endpoints) => self.slices[index].delete_endpoints(out),
        }
    }
}

impl Encode for Arc<Node> {
    const SET: Set = Set::GlobalNodeInfos;

    fn encode(&self) -> Vec<u8> {
        node_info(self).encode_to_vec()
    }
}

impl Encode for SentService {
    const SET: Set = Set::GlobalServiceInfos;

    fn encode(&self) -> Vec<u8> {
        service_info(&self.service, self.trigger_time).encode_to_vec()
    }
}

impl SliceChange {
    fn set_endpoints(&self, out: &mut VecDeque<OpItem>) {
        let Some(new) = &self.new else { return };
        let is_same_otherwise =
            self.old.as_ref().is_some_and(|old| old.ports == new.ports && old.service == new.service);
        let old_keys = keys(&self.old);
        for (key, endpoint) in keys(&self.new) {
            if is_same_otherwise && old_keys.get(&key) == Some(&endpoint) {
                continue;
            }
            let bytes = endpoint_info(new, endpoint).encode_to_vec();
            out.extend(paths(new, &key).map(|path| set(Set::GlobalEndpointInfos, path, bytes.clone())));
        }
    }

    fn delete_endpoints(&self, out: &mut VecDeque<OpItem>) {
        let Some(old) = &self.old else { return };
        let has_moved = self.new.as_ref().is_some_and(|new| new.service != old.service);
        let new_keys = keys(&self.new);
        for key in keys(&self.old).keys().rev() {
            let is_gone = !new_keys.contains_key(key);
            let [with_service, without] = paths(old, key).map(|it| delete(Set::GlobalEndpointInfos, it));
            out.extend((is_gone || has_moved).then_some(with_service));
            out.extend(is_gone.then_some(without));
        }
    }
}

fn keys(slice: &Option<Arc<EndpointSlice>>) -> BTreeMap<String, &Endpoint> {
    slice.as_ref().map(|it| endpoints_by_key(it)).unwrap_or_default()
}

/// The paths of an endpoint: one with its Service, and one without.
fn paths(slice: &EndpointSlice, key: &str) -> [String; 2] {
    let (SliceName { namespace, name }, service) = (&slice.name, &slice.service.name);
    [format!("{namespace}|{service}|{name}|{key}"), format!("{namespace}||{name}|{key}")]
}
