//! Splits a file into documents.
//!
//! The one rule: what a file asks for is bounded by its size.
//! Nesting is limited, and what aliases may grow to.

use serde_json::Value;
use serde_saphyr::{Options, Spanned, options::AliasLimits};

use super::parse::Position;

/// How deep a document may be nested; what is in a manifest is not half as deep.
const DEEPEST: usize = 100;
/// How many nodes all aliases of a file may add up to.
const MOST_REPLAYED: usize = 100_000;

type Document = Result<(Position, Value), (Position, String)>;

/// The documents of a YAML stream, up to the first that is broken; empty ones are left out.
pub(super) fn yaml(bytes: &[u8]) -> Vec<Document> {
    let mut found = Vec::new();
    let mut reader = bytes;
    let read = serde_saphyr::read_with_options::<_, Spanned<Value>>(&mut reader, yaml_options());
    let mut line = 1;
    for document in read {
        let broken = document.is_err();
        found.push(match document {
            Ok(Spanned { value, referenced, .. }) => {
                line = usize::try_from(referenced.line()).unwrap_or(line);
                Ok((position(bytes, line), value))
            }
            Err(error) => {
                let at = error.location().and_then(|it| usize::try_from(it.line()).ok()).unwrap_or(line);
                let text = error.without_snippet().to_string();
                Err((position(bytes, at), format!("{}; correct it", one_line(&text))))
            }
        });
        if broken {
            break;
        }
    }
    found
}

fn yaml_options() -> Options {
    let mut limits = AliasLimits::default();
    limits.max_total_replayed_events = MOST_REPLAYED;
    // A whole cluster may be in one file: what is bounded is depth and repetition, not size.
    let budget = serde_saphyr::budget! {
        max_depth: DEEPEST,
        max_events: usize::MAX,
        max_nodes: usize::MAX,
        max_documents: usize::MAX,
        max_total_scalar_bytes: usize::MAX,
        max_reader_input_bytes: None,
    };
    serde_saphyr::options! { budget: budget, alias_limits: limits, with_snippet: false }
}

/// The values of a JSON stream, up to the first that is broken.
pub(super) fn json(bytes: &[u8]) -> Vec<Document> {
    let mut found = Vec::new();
    let mut stream = serde_json::Deserializer::from_slice(bytes).into_iter::<Value>();
    loop {
        let start = stream.byte_offset();
        let blank = bytes[start..].iter().take_while(|it| it.is_ascii_whitespace()).count();
        let at = Position { document: found.len() + 1, line: line_of(bytes, start + blank) };
        match stream.next() {
            None => return found,
            Some(Ok(value)) => found.push(Ok((at, value))),
            Some(Err(error)) => {
                found.push(Err((Position { line: error.line(), ..at }, format!("{error}; correct it"))));
                return found;
            }
        }
    }
}

/// The line on which the byte at `offset` stands.
fn line_of(bytes: &[u8], offset: usize) -> usize {
    bytes[..offset].iter().filter(|it| **it == b'\n').count() + 1
}

/// Which document of a YAML stream a line belongs to: a marker in the first column can be nothing else.
fn position(bytes: &[u8], line: usize) -> Position {
    let mut document = 1;
    let mut begun = false;
    for text in bytes.split(|it| *it == b'\n').take(line) {
        if text.starts_with(b"---") {
            document += usize::from(begun);
            begun = true;
        } else {
            begun |= !matches!(text.trim_ascii().first(), None | Some(b'#' | b'%'));
        }
    }
    Position { document, line }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
