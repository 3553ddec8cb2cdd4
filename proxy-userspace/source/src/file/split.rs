//! Splits a file into documents, and lists into their items, without parsing them.
//!
//! Invariant: a part means alone what it means in its file. Where that is not certain, the text is not split.

use std::{borrow::Cow, mem};

use memchr::memchr_iter;
use serde::Deserialize;
use serde_json::{Deserializer, value::RawValue};

/// A part of a file, and the line on which it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Text<'a> {
    pub(super) line: u32,
    pub(super) text: &'a str,
}

impl<'a> Text<'a> {
    /// The part from byte `start` to byte `end`.
    fn part(self, start: usize, end: usize) -> Self {
        let lines = memchr_iter(b'\n', &self.text.as_bytes()[..start]).count();
        let line = self.line.saturating_add(u32::try_from(lines).unwrap_or(u32::MAX));
        Self { line, text: &self.text[start..end] }
    }

    /// Its lines with their numbers and offsets.
    fn lines(self) -> impl Iterator<Item = (u32, usize, &'a str)> {
        let bytes = self.text.as_bytes();
        let ends = memchr_iter(b'\n', bytes).map(|it| it + 1).chain([bytes.len()]);
        let mut start = 0;
        let lines = ends.zip(self.line..).map(move |(end, line)| {
            let offset = mem::replace(&mut start, end);
            (line, offset, &self.text[offset..end])
        });
        lines.filter(|(_, _, it)| !it.is_empty())
    }

    /// Without the marker of a document.
    fn body(self) -> Self {
        self.part(if is_marker(self.text) { MARKER.len() } else { 0 }, self.text.len())
    }
}

const MARKER: &str = "---";

/// The documents of a stream with their markers `---`; `None` if they cannot be told apart line by line.
///
/// In YAML a line that starts with `---` always starts a document, and in JSON there is none.
pub(super) fn documents(text: &str) -> Option<Vec<Text<'_>>> {
    let text = Text { line: 1, text };
    let mut documents = Vec::new();
    // What precedes the first document may be comments only.
    let mut document: Option<(u32, usize)> = None;
    let part = |(line, start): (u32, usize), end| Text { line, text: &text.text[start..end] };
    for (line, offset, it) in text.lines() {
        match it.as_bytes()[0] {
            // A directive belongs to the next document.
            b'%' => return None,
            b'.' if it.starts_with("...") => return None,
            b'-' if is_marker(it) => {
                documents.extend(document.replace((line, offset)).map(|it| part(it, offset)));
            }
            _ if document.is_none() && !is_blank(it) => document = Some((line, offset)),
            _ => {}
        }
    }
    documents.extend(document.map(|it| part(it, text.text.len())));
    Some(documents)
}

/// Whether a line starts a document.
fn is_marker(line: &str) -> bool {
    line.strip_prefix(MARKER).is_some_and(|it| it.is_empty() || it.starts_with([' ', '\t', '\r', '\n']))
}

/// Whether a line has no content, but perhaps a comment.
fn is_blank(line: &str) -> bool {
    matches!(line.trim_start().as_bytes().first(), None | Some(b'#'))
}

/// A value of a stream in JSON.
#[derive(Debug)]
pub(super) struct JsonValue<'a> {
    pub(super) text: Text<'a>,
    pub(super) version: Option<Cow<'a, str>>,
    pub(super) kind: Option<Cow<'a, str>>,
    /// The elements of the field `items`, if there is one.
    pub(super) items: Option<Vec<Text<'a>>>,
}

/// Whether a document looks like JSON. A mapping of YAML may, too.
pub(super) fn is_json(document: Text<'_>) -> bool {
    document.body().text.trim_start().starts_with('{')
}

/// The values of a document in JSON, which may be a stream of them, up to an error.
pub(super) fn json(document: Text<'_>) -> (Vec<JsonValue<'_>>, serde_json::Result<()>) {
    #[derive(Deserialize)]
    struct Object<'a> {
        #[serde(rename = "apiVersion", borrow)]
        version: Option<Cow<'a, str>>,
        #[serde(borrow)]
        kind: Option<Cow<'a, str>>,
        #[serde(borrow)]
        items: Option<Vec<&'a RawValue>>,
    }

    let mut values = Vec::new();
    let mut rest = document.body();
    let mut stream = Deserializer::from_str(rest.text).into_iter::<Object<'_>>();
    let mut start = 0;
    while let Some(object) = stream.next() {
        let Object { version, kind, items } = match object {
            Ok(object) => object,
            Err(error) => return (values, Err(error)),
        };
        let length = stream.byte_offset() - start;
        start = stream.byte_offset();
        let blanks = rest.text.len() - rest.text.trim_start().len();
        let text = rest.part(blanks, length);
        rest = rest.part(length, rest.text.len());
        let items = items.map(|items| {
            let mut rest = text;
            let item = |it: &'_ RawValue| {
                // Each element is a part of the text.
                let start = it.get().as_ptr().addr() - rest.text.as_ptr().addr();
                rest = rest.part(start, rest.text.len());
                Text { text: &rest.text[..it.get().len()], ..rest }
            };
            items.into_iter().map(item).collect()
        });
        values.push(JsonValue { text, version, kind, items });
    }
    (values, Ok(()))
}

/// A document in YAML that has the field `items`, with one element per line that starts with `-`.
#[derive(Debug)]
pub(super) struct YamlList<'a> {
    /// The fields before and after `items`.
    pub(super) fields: [Text<'a>; 2],
    pub(super) items: Vec<Text<'a>>,
}

/// A document as a list; `None` if it is none, or cannot be split line by line.
pub(super) fn yaml_list(document: Text<'_>) -> Option<YamlList<'_>> {
    let text = document.text;
    let mut lines = document.lines();
    let is_items = |it: &str| it.strip_prefix("items:").is_some_and(is_blank);
    let (_, header_end, _) = lines.by_ref().find(|(_, _, it)| is_items(it))?;
    let mut items: Vec<Text<'_>> = Vec::new();
    // The indentation of the elements, and the start of the current one.
    let (mut indentation, mut current) = (None, None);
    let mut end = None;
    for (line, offset, it) in lines {
        let content = it.trim_start_matches(' ');
        let indented = it.len() - content.len();
        if is_blank(content) {
            continue;
        }
        let is_element =
            content.strip_prefix('-').is_some_and(|it| it.is_empty() || it.starts_with(char::is_whitespace));
        match indentation {
            Some(least) if indented > least => continue,
            None if is_element => indentation = Some(indented),
            Some(least) if indented == least && is_element => {}
            // The next field; also if there is no element at all.
            _ if indented == 0 && !content.starts_with('\t') => {
                end = Some((line, offset));
                break;
            }
            _ => return None,
        }
        items.extend(
            current.replace((line, offset)).map(|(line, start)| Text { line, text: &text[start..offset] }),
        );
    }
    let (last_line, end) = end.unwrap_or((0, text.len()));
    items.extend(current.map(|(line, start)| Text { line, text: &text[start..end] }));
    let before = Text { text: &text[..header_end], ..document };
    let after = Text { line: last_line, text: &text[end..] };
    let is_again = after.text.split_inclusive('\n').any(|it| it.starts_with("items"));
    (!is_again && !items.is_empty()).then_some(YamlList { fields: [before, after], items })
}
