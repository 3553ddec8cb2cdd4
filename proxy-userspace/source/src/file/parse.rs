//! Parses the objects in one file.
//!
//! Invariant: a file is used as a whole or not at all, and parsing never panics. A document that does not parse makes the
//! whole file unusable; an invalid part of an object is rejected alone.

use std::{path::Path, sync::Arc};

use model::{Rejected, cluster, escaped_line};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::documents::{self, Document, Position};
use crate::{
    kube_types::{self, Converted, objects},
    text::shortened,
};

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManifestFormat {
    /// A stream of YAML documents.
    Yaml,
    /// A stream of JSON values.
    Json,
}

impl ManifestFormat {
    /// JSON for a name that ends in `.json`, else YAML, which contains JSON.
    pub fn of(path: &Path) -> Self {
        let is_json = path.extension().is_some_and(|it| it.eq_ignore_ascii_case("json"));
        if is_json { Self::Json } else { Self::Yaml }
    }
}

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

/// An object that the brain needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// `v1 Service`.
    Service(Arc<cluster::Service>),
    /// `discovery.k8s.io/v1 EndpointSlice`.
    EndpointSlice(Arc<cluster::EndpointSlice>),
    /// `v1 Node`.
    Node(Arc<cluster::Node>),
}

/// The content of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedManifest {
    /// The objects and their positions.
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

/// Parses the manifests in `bytes`; `file` is the name for messages.
pub fn parse(file: &str, bytes: &[u8], format: ManifestFormat) -> Result<ParsedManifest, ParseError> {
    let mut parsed = ParsedManifest::default();
    let take = |document: Document| {
        parsed.documents += 1;
        document.and_then(|(at, value)| parsed.add(at, value, None).map_err(|reason| (at, reason))).map_err(
            |(at, reason)| {
                let reason = escaped_line(&reason).into_owned();
                ParseError { file: file.to_owned(), at, reason }
            },
        )
    };
    match format {
        ManifestFormat::Yaml => documents::yaml(bytes, take)?,
        ManifestFormat::Json => documents::json(bytes, take)?,
    }
    Ok(parsed)
}

/// `apiVersion` and `kind` of the items of a typed list, which may omit them.
type ItemKind = Option<(&'static str, &'static str)>;

impl ParsedManifest {
    fn add(&mut self, at: Position, mut value: Value, item_kind: ItemKind) -> Result<(), String> {
        let field = |key| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let (version, kind) = match (field("apiVersion"), field("kind"), item_kind) {
            (Some(version), Some(kind), _) => (version, kind),
            (_, _, Some((version, kind))) => (version.to_owned(), kind.to_owned()),
            _ => return Err(format!("{} is not a manifest; it needs apiVersion and kind", excerpt(&value))),
        };
        match (version.as_str(), kind.as_str()) {
            ("v1", "Service") => self.convert(at, value, kube_types::service, Object::Service),
            ("v1", "Node") => self.convert(at, value, kube_types::node, Object::Node),
            ("discovery.k8s.io/v1", "EndpointSlice") => {
                let convert = |it: &objects::EndpointSlice| {
                    let mut converted = kube_types::endpoint_slice(it);
                    converted.rejected.extend(kube_types::missing_field(it));
                    converted
                };
                self.convert(at, value, convert, Object::EndpointSlice)
            }
            ("v1", "List") => self.add_all(at, &mut value, None),
            ("v1", "ServiceList") => self.add_all(at, &mut value, Some(("v1", "Service"))),
            ("v1", "NodeList") => self.add_all(at, &mut value, Some(("v1", "Node"))),
            ("discovery.k8s.io/v1", "EndpointSliceList") => {
                self.add_all(at, &mut value, Some(("discovery.k8s.io/v1", "EndpointSlice")))
            }
            _ => {
                let kind = shortened(format!("{version} {kind}"), MAX_EXCERPT);
                self.ignored.push((at, escaped_line(&kind).into_owned()));
                Ok(())
            }
        }
    }

    fn add_all(&mut self, at: Position, list: &mut Value, item_kind: ItemKind) -> Result<(), String> {
        match list.get_mut("items").map(Value::take) {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Array(items)) => items.into_iter().enumerate().try_for_each(|(index, item)| {
                self.add(at, item, item_kind).map_err(|reason| format!("items[{index}]: {reason}"))
            }),
            Some(other) => Err(format!("items: {} is not a list of objects", excerpt(&other))),
        }
    }

    fn convert<K: DeserializeOwned, T>(
        &mut self,
        at: Position,
        value: Value,
        convert: impl Fn(&K) -> Converted<T>,
        object: impl Fn(Arc<T>) -> Object,
    ) -> Result<(), String> {
        let name = name_of(&value);
        let typed: K = serde_path_to_error::deserialize(value).map_err(|error| {
            let path = error.path().to_string();
            format!("{name}: {path}: {}", error.into_inner())
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

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
