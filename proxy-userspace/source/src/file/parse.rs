//! Converts documents to objects.
//!
//! Invariant: parsing never panics. A document that does not parse makes the whole file unusable; an invalid part of an
//! object is rejected alone.

use std::iter::repeat;

use model::{Rejected, RequestedMetadata, cluster::Object, escaped_line};
use serde_json::Value;

use super::documents::{self, Document, ParseError, Position};
use crate::{kube_types::Kind, text::shortened};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedManifest {
    pub objects: Vec<(Position, Object)>,
    pub rejected: Vec<Rejected>,
    /// Positions of objects of other kinds, with `apiVersion kind`.
    pub ignored: Vec<(Position, String)>,
    /// The number of documents, empty lists included.
    pub documents: usize,
}

/// Parses the manifests in `bytes`, in YAML or JSON, without labels and annotations.
pub fn parse(bytes: &[u8]) -> Result<ParsedManifest, ParseError> {
    ParsedManifest::read(bytes, &RequestedMetadata::default())
}

/// How much of a value a message shows, in characters.
const MAX_EXCERPT: usize = 60;

/// The kind of items that may omit it: those of a typed list, such as a `ServiceList`.
type ItemKind = Option<Kind>;

/// What the items of a list are; `None` if the kind is none of a list.
fn list_of(version: &str, kind: &str) -> Option<ItemKind> {
    match kind.strip_suffix("List")? {
        "" => (version == "v1").then_some(None),
        item => Kind::of(version, item).map(Some),
    }
}

impl ParsedManifest {
    pub(super) fn read(bytes: &[u8], requested: &RequestedMetadata) -> Result<Self, ParseError> {
        let mut parsed = Self::default();
        let read = documents::read(bytes, |Document { at, value, item_lines }| {
            parsed.documents += 1;
            parsed.add((at, &item_lines), value, None, requested)
        });
        read.map_err(|it| ParseError { reason: escaped_line(&it.reason).into_owned(), ..it })?;
        parsed.objects.shrink_to_fit();
        Ok(parsed)
    }

    /// Whether there is something to report.
    pub(super) fn has_remarks(&self) -> bool {
        self.documents == 0 || !self.rejected.is_empty() || !self.ignored.is_empty()
    }

    /// Adds an object, or those of a list, whose elements are at these lines; `item` has the type of an element without one.
    fn add(
        &mut self,
        (at, item_lines): (Position, &[u32]),
        mut value: Value,
        item: ItemKind,
        requested: &RequestedMetadata,
    ) -> Result<(), ParseError> {
        let field = |key| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let (version, kind) = match (field("apiVersion"), field("kind"), item) {
            (Some(version), Some(kind), _) => (version, kind),
            (_, _, Some(item)) => {
                let (version, kind) = item.names();
                (version.to_owned(), kind.to_owned())
            }
            _ => {
                let reason = format!("{} is not a manifest; it needs apiVersion and kind", excerpt(&value));
                return Err(ParseError { at, reason });
            }
        };
        if let Some(item) = list_of(&version, &kind) {
            return self.add_all((at, item_lines), &mut value, item, requested);
        }
        let Some(kind) = Kind::of(&version, &kind) else {
            let kind = shortened(format!("{version} {kind}"), MAX_EXCERPT);
            self.ignored.push((at, escaped_line(&kind).into_owned()));
            return Ok(());
        };
        let (converted, _) = kind.convert(&value, requested, true).map_err(|reason| {
            let reason = format!("{}: {reason}", name_of(&value));
            ParseError { at, reason }
        })?;
        self.rejected.extend(converted.rejected);
        self.objects.extend(converted.object.map(|it| (at, it)));
        Ok(())
    }

    fn add_all(
        &mut self,
        (at, item_lines): (Position, &[u32]),
        list: &mut Value,
        kind: ItemKind,
        requested: &RequestedMetadata,
    ) -> Result<(), ParseError> {
        let items = match list.get_mut("items").map(Value::take) {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::Array(items)) => items,
            Some(other) => {
                let reason = format!("items: {} is not a list of objects", excerpt(&other));
                return Err(ParseError { at, reason });
            }
        };
        // The lines of a list in a list are not known.
        let lines = item_lines.iter().copied().chain(repeat(at.line));
        for ((index, item), line) in items.into_iter().enumerate().zip(lines) {
            let added = self.add((Position { line, ..at }, &[]), item, kind, requested);
            added.map_err(|it| ParseError { reason: format!("items[{index}]: {}", it.reason), ..it })?;
        }
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
