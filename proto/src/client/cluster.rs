//! The state of a whole cluster: `globalv1.Sets/Watch`, for a brain that follows another brain.

use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

use super::{
    connect::{Client, MAX_MESSAGE_SIZE},
    session::{Refused, Session},
    state::ClusterChange,
    view::{Path, View},
};
use crate::{
    digest::position,
    globalv1::{EndpointInfo, GlobalWatchReq, NodeInfo, ServiceInfo, sets_client::SetsClient},
    localv1::{Digests, OpItem, Set},
};

/// Follows the changes of a cluster; returned by [`Client::cluster`](super::Client::cluster).
///
/// ```no_run
/// # use proxy_contract::client::{Client, Cluster};
/// # async fn example(client: Client) {
/// let (mut changes, mut cluster) = (client.cluster(), Cluster::default());
/// loop {
///     match changes.next().await {
///         Ok(change) => cluster.apply(change),
///         Err(refused) => eprintln!("the brain has no cluster state: {refused}"),
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct ClusterWatch(Session<ClusterView>);

impl ClusterWatch {
    pub(super) fn new(client: &Client) -> Self {
        Self(Session::new(client))
    }

    /// Waits for a state that differs from the last one, and returns the difference; the first one is that to the empty state.
    /// Intermediate states are skipped. The cost is that of the changes.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    ///
    /// The peer does not offer this API, or does not permit it. The next call asks again after up to a minute.
    /// Other errors and outages are not returned.
    pub async fn next(&mut self) -> Result<ClusterChange, Refused> {
        self.0.try_next().await
    }
}

/// Endpoints are keyed by `slice|key`.
#[derive(Clone, Debug)]
pub(super) enum ClusterView {}

impl View for ClusterView {
    type Request = GlobalWatchReq;
    type Node = NodeInfo;
    type Service = ServiceInfo;
    type Endpoint = EndpointInfo;

    fn request(client: &Client, have: Option<Digests>) -> GlobalWatchReq {
        GlobalWatchReq { extensions: client.extension_numbers(), have }
    }

    fn position(set: Set, name: &str) -> u32 {
        let name = name.replace('/', "|");
        match set {
            Set::ServicesSet => position(Set::GlobalServiceInfos, &format!("{name}||")),
            Set::NodesSet => position(Set::GlobalNodeInfos, &format!("|{name}||")),
            Set::ServiceCidrsSet => position(set, &format!("|{name}||")),
            _ => position(set, &format!("{name}||")),
        }
    }

    async fn open(
        channel: Channel,
        requests: ReceiverStream<GlobalWatchReq>,
    ) -> Result<Streaming<OpItem>, Status> {
        let mut sets = SetsClient::new(channel).max_decoding_message_size(MAX_MESSAGE_SIZE);
        Ok(sets.watch(requests).await?.into_inner())
    }

    fn parse_path(set: Set, path: &str) -> Option<Path> {
        let parts: Vec<_> = path.split('|').collect();
        match (set, *parts.as_array()?) {
            // A name is unique as `namespace/name`.
            (_, [namespace, name, _, _]) if namespace.contains('/') || name.contains('/') => None,
            (Set::GlobalNodeInfos, ["", name, "", ""]) if !name.is_empty() => Some(Path::Node(name.into())),
            (Set::ServiceCidrsSet, ["", name, "", ""]) if !name.is_empty() => {
                Some(Path::ServiceCidr(name.into()))
            }
            (Set::PodsSet, [namespace, name, "", ""]) if !namespace.is_empty() && !name.is_empty() => {
                Some(Path::Pod(format!("{namespace}/{name}").into()))
            }
            (Set::GlobalServiceInfos, [namespace, name, "", ""])
                if !namespace.is_empty() && !name.is_empty() =>
            {
                Some(Path::Service(format!("{namespace}/{name}").into()))
            }
            (Set::GlobalEndpointInfos, [_, "", _, _]) => Some(Path::Duplicate),
            (Set::GlobalEndpointInfos, [namespace, service, slice, key]) if !namespace.is_empty() => {
                Some(Path::Endpoint(format!("{namespace}/{service}").into(), format!("{slice}|{key}").into()))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_in_the_bucket_of_its_path() {
        for (set, path) in [
            (Set::GlobalServiceInfos, "ns|web||"),
            (Set::GlobalNodeInfos, "|n1||"),
            (Set::ServiceCidrsSet, "|kubernetes||"),
            (Set::PodsSet, "ns|web-1||"),
        ] {
            let (kind, name) = match ClusterView::parse_path(set, path) {
                Some(Path::Service(it)) => (Set::ServicesSet, it),
                Some(Path::Node(it)) => (Set::NodesSet, it),
                Some(Path::ServiceCidr(it)) => (Set::ServiceCidrsSet, it),
                Some(Path::Pod(it)) => (Set::PodsSet, it),
                _ => panic!("{path} is invalid"),
            };
            assert_eq!(ClusterView::position(kind, &name), position(set, path), "{path}");
        }
        // Another Service would have the same name.
        assert!(ClusterView::parse_path(Set::GlobalServiceInfos, "ns|web/1||").is_none());
    }
}
