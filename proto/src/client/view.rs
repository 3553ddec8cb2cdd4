//! The services whose streams carry change sets, and the events of such a stream.

use std::{fmt, future::Future, sync::Arc};

use prost::Message;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

use super::connect::Connector;
use crate::{
    digest::KeptBuckets,
    localv1::{Digests, Extension, OpItem, Pod, Ref, Revision, ServiceCidr, Set, Value, op_item::Op},
};

/// One of the services whose streams carry change sets.
pub(super) trait View: Clone + fmt::Debug + Send + 'static {
    type Request: Clone + Send + 'static;
    type Node: Message + Clone + Default + PartialEq;
    type Service: Message + Clone + Default + PartialEq;
    type Endpoint: Message + Clone + Default + PartialEq;

    fn request(connector: &Connector) -> Self::Request;

    /// Adds to the first request of a stream what the client has.
    fn resume(request: &mut Self::Request, have: Option<Digests>);

    /// The position of the group of a name. The kind of the object is given by its set in [`localv1`](crate::localv1).
    fn position(set: Set, name: &str) -> u32;

    /// Marks in a request that the last state is not active.
    fn unconfirmed(_request: &mut Self::Request) {}

    /// Marks in a request that the unconfirmed state of this revision is active now.
    fn confirmed(_request: &mut Self::Request, _revision: Revision) {}

    /// Opens the stream.
    fn open(
        channel: Channel,
        requests: ReceiverStream<Self::Request>,
    ) -> impl Future<Output = Result<Streaming<OpItem>, Status>> + Send;

    /// The object of a path in a set; `None` if the path is invalid.
    fn parse_path(set: Set, path: &str) -> Option<Path>;
}

/// The object of a path. The name of a Service is `namespace/name`.
pub(super) enum Path {
    ServiceCidr(Arc<str>),
    Pod(Arc<str>),
    Node(Arc<str>),
    Service(Arc<str>),
    /// The Service, and the key of the endpoint within it.
    Endpoint(Arc<str>, Arc<str>),
    /// An endpoint that is also sent under another path.
    Duplicate,
}

/// An operation of the stream. Names are those of [`Path`].
#[derive(Clone, Debug)]
pub(super) enum Event<V: View> {
    /// Everything received before is void; the stream carries these extensions.
    Reset(Vec<Extension>),
    /// Objects in these buckets stay valid.
    Keep(Arc<KeptBuckets>),
    SetServiceCidr(Arc<str>, ServiceCidr),
    DeleteServiceCidr(Arc<str>),
    SetPod(Arc<str>, Pod),
    DeletePod(Arc<str>),
    SetNode(Arc<str>, V::Node),
    DeleteNode(Arc<str>),
    SetService(Arc<str>, V::Service),
    DeleteService(Arc<str>),
    SetEndpoint(Arc<str>, Arc<str>, V::Endpoint),
    DeleteEndpoint(Arc<str>, Arc<str>),
    /// The change set is complete.
    Sync(Option<Revision>),
}

/// The event of an operation; `None` for an endpoint's second path.
pub(super) fn decode<V: View>(op: Op) -> Result<Option<Event<V>>, String> {
    Ok(Some(match op {
        Op::Reset(it) => Event::Reset(it.extensions().collect()),
        Op::Sync(it) => Event::Sync(it.revision),
        // Neither was requested.
        Op::Kept(_) | Op::Heartbeat(_) => return Ok(None),
        Op::Set(Value { r#ref, bytes }) => match parse_ref::<V>(r#ref)? {
            Path::ServiceCidr(name) => {
                Event::SetServiceCidr(name.clone(), message("ServiceCIDR", &name, &bytes)?)
            }
            Path::Pod(name) => Event::SetPod(name.clone(), message("pod", &name, &bytes)?),
            Path::Node(name) => Event::SetNode(name.clone(), message("node", &name, &bytes)?),
            Path::Service(name) => Event::SetService(name.clone(), message("service", &name, &bytes)?),
            Path::Endpoint(service, key) => {
                let endpoint = message("endpoint", &format!("{service}/{key}"), &bytes)?;
                Event::SetEndpoint(service, key, endpoint)
            }
            Path::Duplicate => return Ok(None),
        },
        Op::Delete(it) => match parse_ref::<V>(Some(it))? {
            Path::ServiceCidr(name) => Event::DeleteServiceCidr(name),
            Path::Pod(name) => Event::DeletePod(name),
            Path::Node(name) => Event::DeleteNode(name),
            Path::Service(name) => Event::DeleteService(name),
            Path::Endpoint(service, key) => Event::DeleteEndpoint(service, key),
            Path::Duplicate => return Ok(None),
        },
    }))
}

fn parse_ref<V: View>(it: Option<Ref>) -> Result<Path, String> {
    let Ref { set, path } = it.ok_or("an item without a path")?;
    let known = Set::try_from(set).map_err(|_| format!("path {path:?} of the unknown set {set}"))?;
    V::parse_path(known, &path)
        .ok_or_else(|| format!("path {path:?}, which is invalid in set {}", known.as_str_name()))
}

fn message<T: Message + Default>(kind: &str, name: &str, bytes: &[u8]) -> Result<T, String> {
    T::decode(bytes).map_err(|it| format!("{kind} {name}: {it}"))
}
