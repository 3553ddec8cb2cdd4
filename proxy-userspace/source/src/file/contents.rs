//! What a file contains: the objects of its documents and of the items of its lists.
//!
//! Invariant: what has the same bytes as before is not parsed again, and no text is kept.
//! A file is used as a whole or not at all.

use std::{collections::HashMap, str, sync::Arc};

use model::{RequestedMetadata, cluster::Object};
use serde_json::Value;
use twox_hash::XxHash3_128;

use super::{
    documents::{self, DocumentError, Position},
    parse::{ListKind, ParseError, ParsedManifest},
    split::{self, JsonValue, Text, YamlList},
};

/// Parses the manifests in `bytes`, in YAML or JSON, without labels and annotations; `file` is the name for messages.
pub fn parse(file: &str, bytes: &[u8]) -> Result<ParsedManifest, ParseError> {
    let contents = Contents::parse(bytes, &Contents::default(), &RequestedMetadata::default())
        .map_err(|error| ParseError::new(file.to_owned(), error))?;
    let mut all = ParsedManifest { documents: contents.documents, ..ParsedManifest::default() };
    for (start, it) in contents.parsed() {
        all.objects.extend(it.objects.iter().map(|(at, it)| (start.plus(*at), it.clone())));
        all.rejected.extend_from_slice(&it.rejected);
        all.ignored.extend(it.ignored.iter().map(|(at, it)| (start.plus(*at), it.clone())));
    }
    Ok(all)
}

/// The content of a file.
#[derive(Debug, Default)]
pub(super) struct Contents {
    parts: Vec<Part>,
    /// The number of documents, empty lists included.
    pub(super) documents: usize,
}

/// A part of a file, as it was parsed.
#[derive(Debug)]
pub(super) struct Part {
    /// The hash of its text, and of how it was parsed.
    hash: u128,
    at: Position,
    parsed: Arc<ParsedManifest>,
}

impl Part {
    /// Its objects and their positions in the file.
    pub(super) fn objects(&self) -> impl Iterator<Item = (Position, &Object)> {
        self.parsed.objects.iter().map(|(at, it)| (self.at.plus(*at), it))
    }
}

impl Contents {
    /// Parses a file, except for what is in `previous`, of which the same was requested.
    pub(super) fn parse(
        bytes: &[u8],
        previous: &Self,
        requested: &RequestedMetadata,
    ) -> Result<Self, DocumentError> {
        let known = previous.parts.iter().map(|it| (it.hash, &it.parsed)).collect();
        let mut parser = Parser { known, requested, contents: Self::default(), document: 0 };
        match str::from_utf8(bytes).ok().and_then(split::documents) {
            Some(documents) => documents.into_iter().try_for_each(|it| parser.document(it))?,
            // A parser of YAML knows other encodings, too.
            None => parser.add(Form::YamlStream, bytes, Position::START)?,
        }
        parser.contents.parts.shrink_to_fit();
        Ok(parser.contents)
    }

    /// The parts of two contents without those that they have in common at their start and at their end.
    pub(super) fn differing<'a>(&'a self, other: &'a Self) -> [&'a [Part]; 2] {
        let is_same = |(a, b): &(&Part, &Part)| Arc::ptr_eq(&a.parsed, &b.parsed);
        let [mut a, mut b] = [&self.parts[..], &other.parts[..]];
        let start = a.iter().zip(b).take_while(is_same).count();
        (a, b) = (&a[start..], &b[start..]);
        let end = a.iter().rev().zip(b.iter().rev()).take_while(is_same).count();
        [&a[..a.len() - end], &b[..b.len() - end]]
    }

    /// What was parsed, with the positions that those in it are relative to.
    pub(super) fn parsed(&self) -> impl Iterator<Item = (Position, &ParsedManifest)> {
        self.parts.iter().map(|it| (it.at, &*it.parsed))
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Whether there is something to report.
    pub(super) fn has_remarks(&self) -> bool {
        self.documents == 0 || self.parsed().any(|(_, it)| !it.rejected.is_empty() || !it.ignored.is_empty())
    }

    /// The objects in their order; of several with the same name the last one counts.
    pub(super) fn objects(&self) -> impl Iterator<Item = (Position, &Object)> {
        self.parts.iter().flat_map(Part::objects)
    }
}

/// How a part is parsed.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// As any number of documents in YAML.
    YamlStream,
    /// As a document in YAML.
    Yaml,
    /// As a value in JSON.
    Json,
    /// As an item of a list, with its index.
    YamlItem(ListKind, usize),
    JsonItem(ListKind, usize),
}

impl Form {
    /// Differs where the same text has another meaning.
    fn seed(self) -> u64 {
        match self {
            Self::YamlStream => 0,
            Self::Yaml => 1,
            Self::Json => 2,
            Self::YamlItem(kind, _) => 0x10 + kind as u64,
            Self::JsonItem(kind, _) => 0x20 + kind as u64,
        }
    }

    fn parse(self, text: &[u8], requested: &RequestedMetadata) -> Result<ParsedManifest, DocumentError> {
        let mut parsed = ParsedManifest::default();
        let json = || documents::json(text);
        match self {
            Self::YamlStream => {
                documents::yaml_stream(text, |at, value| parsed.add_document(at, value, requested))?;
            }
            Self::Yaml => {
                let mut documents = documents::yaml(text)?.into_iter();
                documents.try_for_each(|(at, value)| parsed.add_document(at, value, requested))?;
            }
            Self::Json => parsed.add_document(Position::START, json()?, requested)?,
            Self::YamlItem(kind, index) => match &mut documents::yaml(text)?[..] {
                // It is a list of one element.
                [(at, Value::Array(items))] if items.len() == 1 => {
                    parsed.add_item(*at, items.remove(0), (kind, index), requested)?;
                }
                _ => return Err(DocumentError::not_alone()),
            },
            Self::JsonItem(kind, index) => {
                parsed.add_item(Position::START, json()?, (kind, index), requested)?;
            }
        }
        parsed.objects.shrink_to_fit();
        Ok(parsed)
    }
}

/// Parses a file part by part.
struct Parser<'a> {
    /// What is known already, by the hash of its text.
    known: HashMap<u128, &'a Arc<ParsedManifest>>,
    requested: &'a RequestedMetadata,
    contents: Contents,
    /// The number of documents so far, empty ones included.
    document: u32,
}

impl Parser<'_> {
    fn document(&mut self, document: Text<'_>) -> Result<(), DocumentError> {
        if split::is_json(document) {
            match split::json(document) {
                (values, Ok(())) => return values.into_iter().try_for_each(|it| self.json(it)),
                // Perhaps it is being written; anything else may be a mapping of YAML.
                (values, Err(error)) if error.is_eof() => {
                    let at =
                        Position { document: self.document + values.len() as u32 + 1, line: document.line };
                    return Err(documents::json_error(&error).within(at));
                }
                _ => {}
            }
        }
        self.document += 1;
        let mark = (self.contents.parts.len(), self.contents.documents);
        if let Some((kind, list)) = yaml_list(document) {
            match self.list(&list.items, |index| Form::YamlItem(kind, index)) {
                Err(error) if error.needs_document => {
                    self.contents.parts.truncate(mark.0);
                    self.contents.documents = mark.1;
                }
                result => return result,
            }
        }
        self.add(Form::Yaml, document.text.as_bytes(), self.position(document))
    }

    fn json(&mut self, value: JsonValue<'_>) -> Result<(), DocumentError> {
        self.document += 1;
        let JsonValue { text, version, kind, items } = value;
        let kind = version.zip(kind).and_then(|(version, kind)| ListKind::of(&version, &kind));
        match kind.zip(items) {
            Some((kind, items)) => self.list(&items, |index| Form::JsonItem(kind, index)),
            None => self.add(Form::Json, text.text.as_bytes(), self.position(text)),
        }
    }

    fn list(&mut self, items: &[Text<'_>], form: impl Fn(usize) -> Form) -> Result<(), DocumentError> {
        self.contents.documents += 1;
        let mut items = items.iter().enumerate();
        items.try_for_each(|(index, it)| self.add(form(index), it.text.as_bytes(), self.position(*it)))
    }

    /// Adds a part, which is parsed unless it is known.
    fn add(&mut self, form: Form, text: &[u8], at: Position) -> Result<(), DocumentError> {
        let hash = XxHash3_128::oneshot_with_seed(form.seed(), text);
        let parsed = match self.known.get(&hash) {
            Some(known) => Arc::clone(known),
            None => Arc::new(form.parse(text, self.requested).map_err(|it| it.within(at))?),
        };
        self.contents.documents += parsed.documents;
        self.contents.parts.push(Part { hash, at, parsed });
        Ok(())
    }

    /// Where a text of the current document starts.
    fn position(&self, text: Text<'_>) -> Position {
        Position { document: self.document, line: text.line }
    }
}

/// A document in YAML as a list of a known kind; `None` if it is none, or cannot be split.
fn yaml_list(document: Text<'_>) -> Option<(ListKind, YamlList<'_>)> {
    let list = split::yaml_list(document)?;
    let mut fields = serde_json::Map::new();
    for it in &list.fields {
        for (_, value) in documents::yaml(it.text.as_bytes()).ok()? {
            match value {
                Value::Object(more) if more.keys().all(|it| !fields.contains_key(it)) => fields.extend(more),
                _ => return None,
            }
        }
    }
    let field = |name| fields.get(name).and_then(Value::as_str);
    Some((ListKind::of(field("apiVersion")?, field("kind")?)?, list))
}

#[cfg(test)]
#[path = "contents_tests.rs"]
mod tests;
