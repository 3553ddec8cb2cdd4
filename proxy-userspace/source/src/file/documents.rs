//! Parses the documents of a text.
//!
//! Invariant: memory is bounded by the size of the text. Nesting and alias expansion are limited, and only one document,
//! which takes many times the memory of its text, is held at a time.

use std::fmt;

use serde_json::Value;
use serde_saphyr::{Error, Location, Options, Spanned, options::AliasLimits};

use crate::text::one_line;

/// Nesting limit of a document: fits the stack of a thread with room to spare, and is far above that of manifests.
const MAX_DEPTH: usize = 64;
/// Limit of the nodes that all aliases of a document expand to.
const MAX_ALIAS_NODES: usize = 100_000;

/// A place in a file; both numbers start at 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The document.
    pub document: u32,
    /// The line.
    pub line: u32,
}

impl Position {
    /// The start of a file.
    pub(super) const START: Self = Self { document: 1, line: 1 };

    /// The place in the file of a place in a part that starts here.
    pub(super) fn plus(self, inner: Self) -> Self {
        Self { document: self.document + inner.document - 1, line: self.line + inner.line - 1 }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "document {}, line {}", self.document, self.line)
    }
}

/// Why a text cannot be used.
#[derive(Debug)]
pub(super) struct DocumentError {
    pub(super) at: Position,
    pub(super) reason: String,
    /// Whether the text is part of a document and refers to the rest of it.
    pub(super) needs_document: bool,
}

impl DocumentError {
    pub(super) fn new(at: Position, reason: String) -> Self {
        Self { at, reason, needs_document: false }
    }

    /// A part of a document has no meaning of its own.
    pub(super) fn not_alone() -> Self {
        Self { needs_document: true, ..Self::new(Position::START, String::new()) }
    }

    /// The same error, of a part that starts at `start`.
    pub(super) fn within(self, start: Position) -> Self {
        Self { at: start.plus(self.at), ..self }
    }
}

/// Passes the documents of a YAML stream to `take`, until one is invalid or `take` fails; empty documents are skipped.
pub(super) fn yaml_stream(
    bytes: &[u8],
    mut take: impl FnMut(Position, Value) -> Result<(), DocumentError>,
) -> Result<(), DocumentError> {
    let mut reader = bytes;
    let starts = document_starts(bytes);
    // The number of the document at a line.
    let position = |at: Position| {
        let document = starts.partition_point(|it| *it <= at.line).max(1);
        Position { document: u32::try_from(document).unwrap_or(u32::MAX), ..at }
    };
    let mut last = Position::START;
    for document in serde_saphyr::read_with_options::<_, Spanned<Value>>(&mut reader, yaml_options()) {
        let Spanned { value, referenced, .. } = document.map_err(|error| {
            let error = yaml_error(&error, last);
            DocumentError { at: position(error.at), ..error }
        })?;
        last = line(&referenced, last);
        take(position(last), value)?;
    }
    Ok(())
}

/// The documents of a short YAML text, without the empty ones. This is faster than a stream, and holds all of them at a time.
pub(super) fn yaml(bytes: &[u8]) -> Result<Vec<(Position, Value)>, DocumentError> {
    let documents = serde_saphyr::from_slice_multiple_with_options::<Spanned<Value>>(bytes, yaml_options());
    let documents = documents.map_err(|error| yaml_error(&error, Position::START))?;
    Ok(documents.into_iter().map(|it| (line(&it.referenced, Position::START), it.value)).collect())
}

/// The line of a location, or that of `otherwise`.
fn line(location: &Location, otherwise: Position) -> Position {
    u32::try_from(location.line()).map_or(otherwise, |line| Position { line: line.max(1), ..otherwise })
}

fn yaml_error(error: &Error, last: Position) -> DocumentError {
    let reason = one_line(&error.without_snippet().to_string());
    let place = error.location().map(|it| format!(" at line {}, column {}", it.line(), it.column()));
    DocumentError {
        at: error.location().map_or(last, |it| line(&it, last)),
        needs_document: matches!(error.without_snippet(), Error::UnknownAnchor { .. }),
        reason: without_place(reason, place),
    }
}

/// A reason without the place that a parser appends, which is one in what it was given: a part of the file.
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

/// The value of a JSON text.
pub(super) fn json(bytes: &[u8]) -> Result<Value, DocumentError> {
    serde_json::from_slice(bytes).map_err(|it| json_error(&it))
}

/// An error of a JSON text, at its line.
pub(super) fn json_error(error: &serde_json::Error) -> DocumentError {
    let line = u32::try_from(error.line().max(1)).unwrap_or(u32::MAX);
    let place = format!(" at line {} column {}", error.line(), error.column());
    DocumentError::new(Position { line, ..Position::START }, without_place(error.to_string(), Some(place)))
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
