//! From the bytes of one file to objects.
//!
//! The one rule: a file is taken as a whole or not at all, and never panics.
//! A document that does not parse makes the whole file unusable; a bad part of an object is refused alone.

use std::{fmt, path::Path, sync::Arc};

use model::cluster::{self, Rejected};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::documents::{self, Document};
use crate::kube_types::{self, Converted, objects};

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManifestFormat {
    /// A stream of YAML documents.
    Yaml,
    /// A stream of JSON values.
    Json,
}

impl ManifestFormat {
    /// The format of a file: JSON if it is called so, else YAML, which has JSON in it.
    pub fn of(path: &Path) -> Self {
        let is_json = path.extension().is_some_and(|it| it.eq_ignore_ascii_case("json"));
        if is_json { Self::Json } else { Self::Yaml }
    }
}

/// Why a file could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: document {}, line {}: {reason}", at.document, at.line)]
pub struct ParseError {
    /// The file, as it was named.
    pub file: String,
    /// Where in the file.
    pub at: Position,
    /// What is wrong there, and with which value.
    pub reason: String,
}

/// A place in a file, both counted from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The document.
    pub document: usize,
    /// The line; within a list, that of the document.
    pub line: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "document {}, line {}", self.document, self.line)
    }
}

/// An object that the brain reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// `v1 Service`.
    Service(Arc<cluster::Service>),
    /// `discovery.k8s.io/v1 EndpointSlice`.
    EndpointSlice(Arc<cluster::EndpointSlice>),
    /// `v1 Node`.
    Node(Arc<cluster::Node>),
}

/// What is in a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedManifest {
    /// The objects, and where they stand.
    pub objects: Vec<(Position, Object)>,
    /// Parts of objects that were refused.
    pub rejected: Vec<Rejected>,
    /// Objects of kinds that are not read, and where they stand.
    pub ignored: Vec<(Position, String)>,
    /// How many documents there are, lists of nothing among them.
    pub documents: usize,
}

/// Reads the manifests in `bytes`; `file` is the name for messages.
pub fn parse(file: &str, bytes: &[u8], format: ManifestFormat) -> Result<ParsedManifest, ParseError> {
    let mut parsed = ParsedManifest::default();
    let take = |document: Document| {
        parsed.documents += 1;
        document
            .and_then(|(at, value)| parsed.add(at, value, None).map_err(|reason| (at, reason)))
            .map_err(|(at, reason)| ParseError { file: file.to_owned(), at, reason })
    };
    match format {
        ManifestFormat::Yaml => documents::yaml(bytes, take)?,
        ManifestFormat::Json => documents::json(bytes, take)?,
    }
    Ok(parsed)
}

/// `apiVersion` and `kind` of the objects in a list of one kind, which may leave them out.
type Expected = Option<(&'static str, &'static str)>;

impl ParsedManifest {
    fn add(&mut self, at: Position, mut value: Value, expected: Expected) -> Result<(), String> {
        let word = |key| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let (version, kind) = match (word("apiVersion"), word("kind"), expected) {
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
                    converted.rejected.extend(kube_types::incomplete(it));
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
                self.ignored.push((at, format!("{version} {kind}")));
                Ok(())
            }
        }
    }

    fn add_all(&mut self, at: Position, list: &mut Value, expected: Expected) -> Result<(), String> {
        match list.get_mut("items").map(Value::take) {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Array(items)) => items.into_iter().enumerate().try_for_each(|(index, item)| {
                self.add(at, item, expected).map_err(|reason| format!("items[{index}]: {reason}"))
            }),
            Some(other) => Err(format!("items: {} is not a list of objects; write one", excerpt(&other))),
        }
    }

    fn convert<K: DeserializeOwned, F>(
        &mut self,
        at: Position,
        value: Value,
        convert: impl Fn(&K) -> Converted<F>,
        object: impl Fn(Arc<F>) -> Object,
    ) -> Result<(), String> {
        let name = name_of(&value);
        let typed: K = serde_path_to_error::deserialize(value).map_err(|error| {
            let path = error.path().to_string();
            format!("{name}: {path}: {}; correct the field", error.into_inner())
        })?;
        let converted = convert(&typed);
        self.rejected.extend(converted.rejected);
        self.objects.extend(converted.object.map(|it| (at, object(Arc::new(it)))));
        Ok(())
    }
}

/// `kind namespace/name`, as far as they can be read.
fn name_of(value: &Value) -> String {
    let meta = |key| value.pointer(key).and_then(Value::as_str);
    let kind = meta("/kind").unwrap_or("object");
    let name = meta("/metadata/name").unwrap_or("without a name");
    match meta("/metadata/namespace") {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}

/// The beginning of a value, for messages.
fn excerpt(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
