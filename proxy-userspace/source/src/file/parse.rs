//! Converts documents to objects.
//!
//! Invariant: parsing never panics. A document that does not parse makes the whole file unusable; an invalid part of an
//! object is rejected alone.

use std::sync::Arc;

use model::{Rejected, RequestedMetadata, cluster, escaped_line, state};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::documents::{DocumentError, Position};
use crate::{
    kube_types::{self, Converted, objects},
    text::shortened,
};

/// Why a file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {at}: {reason}")]
pub struct ParseError {
    /// The name of the file.
    pub file: String,
    /// Where in the file.
    pub at: Position,
    /// What is wrong, and with which value.
    pub reason: String,
}

impl ParseError {
    pub(super) fn new(file: String, DocumentError { at, reason, .. }: DocumentError) -> Self {
        Self { file, at, reason: escaped_line(&reason).into_owned() }
    }
}

/// An object that the brain needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// `v1 Service`.
    Service(Arc<cluster::Service>),
    /// `discovery.k8s.io/v1 EndpointSlice`.
    EndpointSlice(Arc<cluster::EndpointSlice>),
    /// `v1 Node`.
    Node(Arc<cluster::Node>),
    /// `networking.k8s.io/v1 ServiceCIDR`.
    ServiceCidr(Arc<state::ServiceCidr>),
    /// `v1 Pod` with our annotation.
    Pod(Arc<state::Pod>),
}

/// What was parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedManifest {
    /// The objects and their positions; for one in a list that is not written item by item, that of the list.
    pub objects: Vec<(Position, Object)>,
    /// Rejected parts of objects.
    pub rejected: Vec<Rejected>,
    /// Positions of objects of other kinds, with `apiVersion kind`.
    pub ignored: Vec<(Position, String)>,
    /// The number of documents, empty lists included.
    pub documents: usize,
}

/// How much of a value a message shows, in characters.
const MAX_EXCERPT: usize = 60;

/// The kinds of lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListKind {
    Any,
    Services,
    EndpointSlices,
    Nodes,
    ServiceCidrs,
    Pods,
}

impl ListKind {
    pub(super) fn of(version: &str, kind: &str) -> Option<Self> {
        Some(match (version, kind) {
            ("v1", "List") => Self::Any,
            ("v1", "ServiceList") => Self::Services,
            ("discovery.k8s.io/v1", "EndpointSliceList") => Self::EndpointSlices,
            ("v1", "NodeList") => Self::Nodes,
            ("networking.k8s.io/v1", "ServiceCIDRList") => Self::ServiceCidrs,
            ("v1", "PodList") => Self::Pods,
            _ => return None,
        })
    }

    /// `apiVersion` and `kind` of items that may omit them.
    fn item(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Any => None,
            Self::Services => Some(("v1", "Service")),
            Self::EndpointSlices => Some(("discovery.k8s.io/v1", "EndpointSlice")),
            Self::Nodes => Some(("v1", "Node")),
            Self::ServiceCidrs => Some(("networking.k8s.io/v1", "ServiceCIDR")),
            Self::Pods => Some(("v1", "Pod")),
        }
    }
}

impl ParsedManifest {
    /// Adds the objects of a document.
    pub(super) fn add_document(
        &mut self,
        at: Position,
        value: Value,
        requested: &RequestedMetadata,
    ) -> Result<(), DocumentError> {
        self.documents += 1;
        self.add(at, value, None, requested).map_err(|reason| DocumentError::new(at, reason))
    }

    /// Adds the objects of an item of a list.
    pub(super) fn add_item(
        &mut self,
        at: Position,
        item: Value,
        (list, index): (ListKind, usize),
        requested: &RequestedMetadata,
    ) -> Result<(), DocumentError> {
        let added = self.add(at, item, list.item(), requested);
        added.map_err(|reason| DocumentError::new(at, format!("items[{index}]: {reason}")))
    }

    fn add(
        &mut self,
        at: Position,
        mut value: Value,
        item: Option<(&'static str, &'static str)>,
        requested: &RequestedMetadata,
    ) -> Result<(), String> {
        let field = |key| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let (version, kind) = match (field("apiVersion"), field("kind"), item) {
            (Some(version), Some(kind), _) => (version, kind),
            (_, _, Some((version, kind))) => (version.to_owned(), kind.to_owned()),
            _ => return Err(format!("{} is not a manifest; it needs apiVersion and kind", excerpt(&value))),
        };
        if let Some(list) = ListKind::of(&version, &kind) {
            return self.add_all(at, &mut value, list, requested);
        }
        match (version.as_str(), kind.as_str()) {
            ("v1", "Service") => {
                let convert = |it: &objects::Service| {
                    let mut converted = kube_types::service(it);
                    kube_types::add_metadata(&mut converted, requested, &value);
                    converted
                };
                self.convert(at, &value, convert, Object::Service)
            }
            ("v1", "Node") => self.convert(at, &value, kube_types::node, Object::Node),
            ("v1", "Pod") => self.convert(at, &value, kube_types::pod, Object::Pod),
            ("networking.k8s.io/v1", "ServiceCIDR") => {
                self.convert(at, &value, kube_types::service_cidr, Object::ServiceCidr)
            }
            ("discovery.k8s.io/v1", "EndpointSlice") => {
                let convert = |it: &objects::EndpointSlice| {
                    let mut converted = kube_types::endpoint_slice(it);
                    converted.rejected.extend(kube_types::missing_field(it));
                    converted
                };
                self.convert(at, &value, convert, Object::EndpointSlice)
            }
            _ => {
                let kind = shortened(format!("{version} {kind}"), MAX_EXCERPT);
                self.ignored.push((at, escaped_line(&kind).into_owned()));
                Ok(())
            }
        }
    }

    fn add_all(
        &mut self,
        at: Position,
        list: &mut Value,
        kind: ListKind,
        requested: &RequestedMetadata,
    ) -> Result<(), String> {
        match list.get_mut("items").map(Value::take) {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Array(items)) => items.into_iter().enumerate().try_for_each(|(index, item)| {
                self.add(at, item, kind.item(), requested)
                    .map_err(|reason| format!("items[{index}]: {reason}"))
            }),
            Some(other) => Err(format!("items: {} is not a list of objects", excerpt(&other))),
        }
    }

    fn convert<K: DeserializeOwned, T>(
        &mut self,
        at: Position,
        value: &Value,
        convert: impl Fn(&K) -> Converted<T>,
        object: impl Fn(Arc<T>) -> Object,
    ) -> Result<(), String> {
        // The path of an error is collected only where there is one.
        let typed = K::deserialize(value).or_else(|_| {
            serde_path_to_error::deserialize(value)
                .map_err(|error| format!("{}: {}: {}", name_of(value), error.path(), error.inner()))
        })?;
        let converted = convert(&typed);
        self.rejected.extend(converted.rejected);
        self.objects.extend(converted.object.map(|it| (at, object(Arc::new(it)))));
        Ok(())
    }
}

/// `kind namespace/name`, as far as they are readable.
fn name_of(value: &Value) -> String {
    let field = |key| value.pointer(key).and_then(Value::as_str);
    let kind = field("/kind").unwrap_or("object");
    let name = field("/metadata/name").unwrap_or("without a name");
    match field("/metadata/namespace") {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}

/// The start of a value, for messages.
fn excerpt(value: &Value) -> String {
    shortened(value.to_string(), MAX_EXCERPT)
}
