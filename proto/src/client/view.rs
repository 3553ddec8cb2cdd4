//! The services whose streams carry change sets, and the events of such a stream.

use std::{fmt, future::Future, sync::Arc};

use prost::Message;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

use super::connect::Client;
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

    /// A request; the first one of a stream says what the client has.
    fn request(client: &Client, have: Option<Digests>) -> Self::Request;

    /// The position of the group of a name. The kind of the object is given by its set in [`localv1`](crate::localv1).
    fn position(set: Set, name: &str) -> u32;

    /// Marks in a request that the last state is not active.
    fn unconfirmed(_request: &mut Self::Request) {}

    /// Marks in a request that the unconfirmed state of this revision is active now.
    fn confirmed(_request: &mut Self::Request, _revision: Revision) {}

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

/// An operation of the stream. Names are those of [`Path`]; an object that is `None` was deleted.
#[derive(Clone, Debug)]
pub(super) enum Event<V: View> {
    /// Everything received before is void; the stream carries these extensions.
    Reset(Vec<Extension>),
    /// Objects in these buckets stay valid.
    Keep(Arc<KeptBuckets>),
    ServiceCidr(Arc<str>, Option<ServiceCidr>),
    Pod(Arc<str>, Option<Pod>),
    Node(Arc<str>, Option<V::Node>),
    Service(Arc<str>, Option<V::Service>),
    /// By its Service, and its key within it.
    Endpoint(Arc<str>, Arc<str>, Option<V::Endpoint>),
    /// The change set is complete.
    Sync(Option<Revision>),
}

/// The event of an operation; `None` for an endpoint's second path.
pub(super) fn decode<V: View>(op: Op) -> Result<Option<Event<V>>, String> {
    let (path, bytes) = match op {
        Op::Reset(it) => return Ok(Some(Event::Reset(it.extensions().collect()))),
        Op::Sync(it) => return Ok(Some(Event::Sync(it.revision))),
        // Neither was requested.
        Op::Kept(_) | Op::Heartbeat(_) => return Ok(None),
        Op::Set(Value { r#ref, bytes }) => (parse_ref::<V>(r#ref)?, Some(bytes)),
        Op::Delete(it) => (parse_ref::<V>(Some(it))?, None),
    };
    let bytes = bytes.as_deref();
    Ok(Some(match path {
        Path::ServiceCidr(name) => Event::ServiceCidr(name.clone(), message("ServiceCIDR", &name, bytes)?),
        Path::Pod(name) => Event::Pod(name.clone(), message("pod", &name, bytes)?),
        Path::Node(name) => Event::Node(name.clone(), message("node", &name, bytes)?),
        Path::Service(name) => Event::Service(name.clone(), message("service", &name, bytes)?),
        Path::Endpoint(service, key) => {
            let endpoint = message("endpoint", format_args!("{service}/{key}"), bytes)?;
            Event::Endpoint(service, key, endpoint)
        }
        Path::Duplicate => return Ok(None),
    }))
}

fn parse_ref<V: View>(it: Option<Ref>) -> Result<Path, String> {
    let Ref { set, path } = it.ok_or("an item without a path")?;
    let known = Set::try_from(set).map_err(|_| format!("path {path:?} of the unknown set {set}"))?;
    V::parse_path(known, &path)
        .ok_or_else(|| format!("path {path:?}, which is invalid in set {}", known.as_str_name()))
}

/// The object in these bytes; `None` if it was deleted.
fn message<T: Message + Default>(
    kind: &str,
    name: impl fmt::Display,
    bytes: Option<&[u8]>,
) -> Result<Option<T>, String> {
    bytes.map(T::decode).transpose().map_err(|it| format!("{kind} {name}: {it}"))
}
