//! The state of one node: `localv1.Sets/Watch`.

use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

use super::{
    connect::{Client, MAX_MESSAGE_SIZE},
    view::{Path, View},
};
use crate::{
    digest::position,
    localv1::{Digests, Endpoint, Node, OpItem, Revision, Service, Set, WatchReq, sets_client::SetsClient},
};

#[derive(Clone, Debug)]
pub(super) enum NodeView {}

impl View for NodeView {
    type Request = WatchReq;
    type Node = Node;
    type Service = Service;
    type Endpoint = Endpoint;

    fn request(client: &Client, have: Option<Digests>) -> WatchReq {
        let extensions = client.extension_numbers();
        WatchReq { node_name: client.node.clone(), extensions, have, ..WatchReq::default() }
    }

    fn unconfirmed(request: &mut WatchReq) {
        request.unconfirmed = true;
    }

    fn confirmed(request: &mut WatchReq, revision: Revision) {
        request.confirmed = Some(revision);
    }

    fn position(set: Set, name: &str) -> u32 {
        position(set, name)
    }

    async fn open(channel: Channel, requests: ReceiverStream<WatchReq>) -> Result<Streaming<OpItem>, Status> {
        let mut sets = SetsClient::new(channel).max_decoding_message_size(MAX_MESSAGE_SIZE);
        Ok(sets.watch(requests).await?.into_inner())
    }

    fn parse_path(set: Set, path: &str) -> Option<Path> {
        let parts: Vec<_> = path.split('/').collect();
        match (set, parts.as_slice()) {
            (_, parts) if parts.contains(&"") => None,
            (Set::ServicesSet, [_, _]) => Some(Path::Service(path.into())),
            (Set::NodesSet, [_]) => Some(Path::Node(path.into())),
            (Set::ServiceCidrsSet, [_]) => Some(Path::ServiceCidr(path.into())),
            (Set::PodsSet, [_, _]) => Some(Path::Pod(path.into())),
            (Set::EndpointsSet, [namespace, service, key]) => {
                Some(Path::Endpoint(format!("{namespace}/{service}").into(), (*key).into()))
            }
            _ => None,
        }
    }
}
