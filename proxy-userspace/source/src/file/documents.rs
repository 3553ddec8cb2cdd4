//! Splits a file into documents.
//!
//! The one rule: what a file asks for is bounded by its size.
//! Nesting is limited, and what aliases may grow to; and one document at a time is in memory, which is many times its text.

use serde_json::Value;
use serde_saphyr::{Options, Spanned, options::AliasLimits};

use super::parse::Position;

/// How deep a document may be nested: the stack of a thread holds it with room to spare, and a manifest is not half as
/// deep.
const DEEPEST: usize = 64;
/// How many nodes all aliases of a file may add up to.
const MOST_REPLAYED: usize = 100_000;

/// A document and where it is, or what is wrong with it and where.
pub(super) type Document = Result<(Position, Value), (Position, String)>;

/// Hands over the documents of a YAML stream, until one is broken or not wanted; empty ones are left out.
pub(super) fn yaml<E>(bytes: &[u8], mut take: impl FnMut(Document) -> Result<(), E>) -> Result<(), E> {
    let mut reader = bytes;
    let begins = begins(bytes);
    let position = |line| Position { document: begins.partition_point(|it| *it <= line).max(1), line };
    let mut line = 1;
    for document in serde_saphyr::read_with_options::<_, Spanned<Value>>(&mut reader, yaml_options()) {
        match document {
            Ok(Spanned { value, referenced, .. }) => {
                line = usize::try_from(referenced.line()).unwrap_or(line);
                take(Ok((position(line), value)))?;
            }
            Err(error) => {
                let at = error.location().and_then(|it| usize::try_from(it.line()).ok()).unwrap_or(line);
                let text = error.without_snippet().to_string();
                return take(Err((position(at), format!("{}; correct it", one_line(&text)))));
            }
        }
    }
    Ok(())
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
    // YAML 1.2: a Node may be called `n`, and a label say `yes`.
    serde_saphyr::options! { budget: budget, alias_limits: limits, strict_booleans: true, with_snippet: false }
}

/// Hands over the values of a JSON stream, until one is broken or not wanted.
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
            Some(Err(error)) => {
                return take(Err((Position { line: error.line(), ..at }, format!("{error}; correct it"))));
            }
        }
    }
    Ok(())
}

/// The lines on which the documents of a YAML stream begin: a marker in the first column can be nothing else.
fn begins(bytes: &[u8]) -> Vec<usize> {
    let mut begins = Vec::new();
    for (line, text) in (1..).zip(bytes.split(|it| *it == b'\n')) {
        let is_content = !matches!(text.trim_ascii().first(), None | Some(b'#' | b'%'));
        if text.starts_with(b"---") || (begins.is_empty() && is_content) {
            begins.push(line);
        }
    }
    begins
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
