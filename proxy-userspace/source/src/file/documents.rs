//! Splits a file into documents.
//!
//! Invariant: memory is bounded by the size of the file. Nesting and alias expansion are limited, and only one document,
//! which takes many times the memory of its text, is held at a time.

use std::fmt;

use serde_json::Value;
use serde_saphyr::{Options, Spanned, options::AliasLimits};

use crate::text::one_line;

/// Nesting limit of a document: fits the stack of a thread with room to spare, and is far above that of manifests.
const MAX_DEPTH: usize = 64;
/// Limit of the nodes that all aliases of a file expand to.
const MAX_ALIAS_NODES: usize = 100_000;

/// A place in a file; both numbers start at 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The document.
    pub document: usize,
    /// The line; for an object in a list, the line of the document.
    pub line: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "document {}, line {}", self.document, self.line)
    }
}

/// A document or an error, with its position.
pub(super) type Document = Result<(Position, Value), (Position, String)>;

/// Passes the documents of a YAML stream to `take`, until one is invalid or `take` fails; empty documents are skipped.
pub(super) fn yaml<E>(bytes: &[u8], mut take: impl FnMut(Document) -> Result<(), E>) -> Result<(), E> {
    let mut reader = bytes;
    let starts = document_starts(bytes);
    let position = |line| Position { document: starts.partition_point(|it| *it <= line).max(1), line };
    let mut line = 1;
    for document in serde_saphyr::read_with_options::<_, Spanned<Value>>(&mut reader, yaml_options()) {
        match document {
            Ok(Spanned { value, referenced, .. }) => {
                line = usize::try_from(referenced.line()).unwrap_or(line);
                take(Ok((position(line), value)))?;
            }
            Err(error) => {
                let at = error.location().and_then(|it| usize::try_from(it.line()).ok()).unwrap_or(line);
                return take(Err((position(at), one_line(&error.without_snippet().to_string()))));
            }
        }
    }
    Ok(())
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

/// Passes the values of a JSON stream to `take`, until one is invalid or `take` fails.
pub(super) fn json<E>(bytes: &[u8], mut take: impl FnMut(Document) -> Result<(), E>) -> Result<(), E> {
    let mut stream = serde_json::Deserializer::from_slice(bytes).into_iter::<Value>();
    let (mut line, mut counted) = (1, 0);
    for document in 1.. {
        let start = stream.byte_offset();
        let blank = bytes[start..].iter().take_while(|it| it.is_ascii_whitespace()).count();
        line += bytes[counted..start + blank].iter().filter(|it| **it == b'\n').count();
        counted = start + blank;
        let at = Position { document, line };
        match stream.next() {
            None => break,
            Some(Ok(value)) => take(Ok((at, value)))?,
            Some(Err(error)) => return take(Err((Position { line: error.line(), ..at }, error.to_string()))),
        }
    }
    Ok(())
}

/// The lines on which the documents of a YAML stream start. `---` in the first column is always a document marker.
fn document_starts(bytes: &[u8]) -> Vec<usize> {
    let mut starts = Vec::new();
    for (line, text) in (1..).zip(bytes.split(|it| *it == b'\n')) {
        let is_content = !matches!(text.trim_ascii().first(), None | Some(b'#' | b'%'));
        if text.starts_with(b"---") || (starts.is_empty() && is_content) {
            starts.push(line);
        }
    }
    starts
}
