//! Parses the documents of a file, in YAML or JSON.
//!
//! Invariant: memory is bounded by the size of the text. Nesting and alias expansion are limited, and only one document,
//! which takes many times the memory of its text, is held at a time.

use std::{fmt, str};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Map, Value, value::RawValue};
use serde_saphyr::{Error, Location, Options, Spanned, options::AliasLimits};

use crate::text::one_line;

/// Nesting limit of a document: fits the stack of a thread with room to spare, and is far above that of manifests.
const MAX_DEPTH: usize = 64;
/// Limit of the nodes that all aliases of a document expand to.
const MAX_ALIAS_NODES: usize = 100_000;

/// A place in a file; both numbers start at 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub document: u32,
    pub line: u32,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "document {}, line {}", self.document, self.line)
    }
}

/// Why a file cannot be used; the caller names the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {reason}")]
pub struct ParseError {
    pub at: Position,
    /// What is wrong, and with which value; one line in what [`parse`](super::parse) returns.
    pub reason: String,
}

pub(super) struct Document {
    pub(super) at: Position,
    pub(super) value: Value,
    /// The lines of the elements of its field `items`, if it is a list.
    pub(super) item_lines: Vec<u32>,
}

/// Passes the documents of a file to `take`, until one is invalid or `take` fails; empty documents are skipped.
pub(super) fn read(
    bytes: &[u8],
    take: impl FnMut(Document) -> Result<(), ParseError>,
) -> Result<(), ParseError> {
    match str::from_utf8(bytes) {
        Ok(text) if is_json(text) => read_json(text, take),
        // A parser of YAML knows other encodings, too.
        _ => read_yaml(bytes, take),
    }
}

/// Whether a text is a stream of JSON, perhaps one that is still being written; a mapping of YAML may begin alike.
fn is_json(text: &str) -> bool {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<IgnoredAny>();
    text.trim_start().starts_with('{') && values.find_map(Result::err).is_none_or(|error| error.is_eof())
}

fn read_json(text: &str, mut take: impl FnMut(Document) -> Result<(), ParseError>) -> Result<(), ParseError> {
    #[derive(Deserialize)]
    struct List<'a> {
        #[serde(borrow)]
        items: Vec<&'a RawValue>,
    }

    let mut lines = LineCounter { rest: text, line: 1 };
    let values = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
    for (document, raw) in (1..).zip(values) {
        let raw = raw.map_err(|it| json_error(&it, Position { document, line: 1 }))?.get();
        let at = Position { document, line: lines.line_of(raw) };
        let value = serde_json::from_str(raw).map_err(|it| json_error(&it, at))?;
        let items = serde_json::from_str(raw).map_or_else(|_| Vec::new(), |List { items }| items);
        let item_lines = items.into_iter().map(|it| lines.line_of(it.get())).collect();
        take(Document { at, value, item_lines })?;
    }
    Ok(())
}

/// An error of a JSON text that starts at a position.
fn json_error(error: &serde_json::Error, start: Position) -> ParseError {
    let line = start.line - 1 + u32::try_from(error.line().max(1)).unwrap_or(u32::MAX);
    let place = format!(" at line {} column {}", error.line(), error.column());
    ParseError { at: Position { line, ..start }, reason: without_place(error.to_string(), Some(place)) }
}

/// Counts the lines of a text up to parts of it, which are asked for in their order.
struct LineCounter<'a> {
    rest: &'a str,
    line: u32,
}

impl LineCounter<'_> {
    fn line_of(&mut self, part: &str) -> u32 {
        let (skipped, rest) = self.rest.split_at(part.as_ptr().addr() - self.rest.as_ptr().addr());
        let breaks = skipped.bytes().filter(|it| *it == b'\n').count();
        self.rest = rest;
        self.line = self.line.saturating_add(u32::try_from(breaks).unwrap_or(u32::MAX));
        self.line
    }
}

fn read_yaml(
    mut bytes: &[u8],
    mut take: impl FnMut(Document) -> Result<(), ParseError>,
) -> Result<(), ParseError> {
    let starts = document_starts(bytes);
    let position = |line: u32| {
        let document = starts.partition_point(|it| *it <= line).max(1);
        Position { document: u32::try_from(document).unwrap_or(u32::MAX), line }
    };
    let mut last = 1;
    for document in serde_saphyr::read_with_options::<_, Spanned<YamlDocument>>(&mut bytes, yaml_options()) {
        let Spanned { value: YamlDocument { fields, items }, referenced, .. } =
            document.map_err(|error| {
                let line = error.location().map_or(last, |it| line(&it, last));
                ParseError { at: position(line), reason: yaml_reason(&error) }
            })?;
        last = line(&referenced, last);
        let item_lines = items.iter().map(|it| line(it, last)).collect();
        take(Document { at: position(last), value: fields.into(), item_lines })?;
    }
    Ok(())
}

/// A mapping in YAML, and the locations of the elements of its field `items`.
#[derive(Default)]
struct YamlDocument {
    fields: Map<String, Value>,
    items: Vec<Location>,
}

impl<'de> Deserialize<'de> for YamlDocument {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(YamlDocumentVisitor)
    }
}

struct YamlDocumentVisitor;

impl<'de> Visitor<'de> for YamlDocumentVisitor {
    type Value = YamlDocument;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a manifest; it needs apiVersion and kind")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<YamlDocument, A::Error> {
        let mut document = YamlDocument::default();
        while let Some(key) = map.next_key::<String>()? {
            let value = if key == "items" {
                let items = map.next_value::<Option<Vec<Spanned<Value>>>>()?.unwrap_or_default();
                document.items = items.iter().map(|it| it.referenced).collect();
                items.into_iter().map(|it| it.value).collect()
            } else {
                map.next_value()?
            };
            document.fields.insert(key, value);
        }
        Ok(document)
    }
}

/// The line of a location, or `otherwise` if it is not known.
fn line(location: &Location, otherwise: u32) -> u32 {
    u32::try_from(location.line()).ok().filter(|it| *it > 0).unwrap_or(otherwise)
}

fn yaml_reason(error: &Error) -> String {
    let reason = one_line(&error.without_snippet().to_string());
    let place = error.location().map(|it| format!(" at line {}, column {}", it.line(), it.column()));
    without_place(reason, place)
}

/// A reason without the place that a parser appends.
fn without_place(mut reason: String, place: Option<String>) -> String {
    if let Some(rest) = place.and_then(|it| reason.strip_suffix(&it).map(str::len)) {
        reason.truncate(rest);
    }
    reason
}

fn yaml_options() -> Options {
    let mut limits = AliasLimits::default();
    limits.max_total_replayed_events = MAX_ALIAS_NODES;
    // One file may hold a whole cluster: depth and repetition are limited, not size.
    let budget = serde_saphyr::budget! {
        max_depth: MAX_DEPTH,
        max_events: usize::MAX,
        max_nodes: usize::MAX,
        max_documents: usize::MAX,
        max_total_scalar_bytes: usize::MAX,
        max_reader_input_bytes: None,
    };
    // Booleans as in YAML 1.2: a Node may have the name `n`, and a label the value `yes`.
    serde_saphyr::options! { budget: budget, alias_limits: limits, strict_booleans: true, with_snippet: false }
}

/// The lines on which the documents of a YAML stream start. `---` in the first column is always a document marker.
fn document_starts(bytes: &[u8]) -> Vec<u32> {
    let mut starts = Vec::new();
    for (line, text) in (1..).zip(bytes.split(|it| *it == b'\n')) {
        let is_content = !matches!(text.trim_ascii().first(), None | Some(b'#' | b'%'));
        if text.starts_with(b"---") || (starts.is_empty() && is_content) {
            starts.push(line);
        }
    }
    starts
}
