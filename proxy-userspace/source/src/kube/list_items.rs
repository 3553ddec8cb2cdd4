//! Splits the body of a list into its objects while it arrives.
//!
//! Invariant: at most one object and what surrounds the objects are held, however long the list is: an API server that
//! answers from its cache sends all objects in one page.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use serde::{Deserialize, de::IgnoredAny};

/// The member of a list that has the objects.
const ITEMS: &[u8] = b"items";

#[derive(Debug, Default)]
pub(super) struct ListItems {
    /// The list without its objects.
    envelope: Vec<u8>,
    /// The begin of an object whose end has not arrived.
    object: Vec<u8>,
    is_in_items: bool,
    /// Open braces and brackets: of the list, or of the object.
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
    /// How much of [`ITEMS`] the current or last string of the list is; `None` if it is another one.
    matched: Option<usize>,
}

#[derive(Deserialize)]
struct Envelope {
    #[serde(default)]
    metadata: ListMeta,
    /// Without them it is no list: what something before the server answers with does not mean that there are no objects.
    #[serde(rename = "items")]
    _items: IgnoredAny,
}

impl ListItems {
    /// Reads more of the body, and passes each complete object to `take`.
    pub(super) fn read<E>(
        &mut self,
        mut data: &[u8],
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        while let Some(end) = data.iter().position(|byte| self.ends_here(*byte)) {
            let (head, tail) = data.split_at(end + 1);
            data = tail;
            if self.is_in_items && head.last() == Some(&b'[') {
                self.envelope.extend_from_slice(head);
            } else if self.is_in_items {
                // An array is none, which `take` reports.
                if self.object.is_empty() {
                    take(without_separator(head))?;
                } else {
                    self.object.extend_from_slice(head);
                    take(without_separator(&self.object))?;
                    self.object.clear();
                }
            } else {
                self.object.clear();
                self.envelope.push(b']');
            }
        }
        if self.is_in_items { &mut self.object } else { &mut self.envelope }.extend_from_slice(data);
        Ok(())
    }

    /// The metadata of the list, at the end of the body.
    pub(super) fn finish(self) -> Result<ListMeta, serde_json::Error> {
        serde_json::from_slice::<Envelope>(&self.envelope).map(|it| it.metadata)
    }

    /// Whether the objects begin with a byte, or one of them ends, or all of them.
    fn ends_here(&mut self, byte: u8) -> bool {
        if self.is_in_string {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => (self.is_escaped, self.matched) = (true, None),
                b'"' => self.is_in_string = false,
                _ => self.matched = self.matched.filter(|it| ITEMS.get(*it) == Some(&byte)).map(|it| it + 1),
            }
            return false;
        }
        let is_items = !self.is_in_items && self.depth == 1 && self.matched == Some(ITEMS.len());
        match byte {
            b'"' => (self.is_in_string, self.matched) = (true, Some(0)),
            b'[' if is_items => {
                (self.is_in_items, self.depth) = (true, 0);
                return true;
            }
            b']' if self.is_in_items && self.depth == 0 => {
                (self.is_in_items, self.depth) = (false, 1);
                return true;
            }
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.is_in_items && self.depth == 0;
            }
            b':' | b' ' | b'\t' | b'\n' | b'\r' => return false,
            _ => {}
        }
        if byte != b'"' {
            self.matched = None;
        }
        false
    }
}

/// An object without the comma and the space before it.
fn without_separator(object: &[u8]) -> &[u8] {
    let begin = object.iter().position(|it| *it == b'{').unwrap_or_default();
    &object[begin..]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// Reads a text in fragments of a size; the objects and the metadata.
    fn split(text: &str, size: usize) -> (Vec<Value>, Result<ListMeta, String>) {
        let (mut list, mut objects) = (ListItems::default(), Vec::new());
        for data in text.as_bytes().chunks(size) {
            let result: Result<(), serde_json::Error> = list.read(data, |object| {
                objects.push(serde_json::from_slice(object)?);
                Ok(())
            });
            result.unwrap();
        }
        (objects, list.finish().map_err(|it| it.to_string()))
    }

    #[track_caller]
    fn check(text: &str, objects: &[Value], version: Option<&str>) {
        for size in [1, 2, 3, 7, 10_000] {
            let (found, metadata) = split(text, size);
            assert_eq!(found, objects, "{text} in fragments of {size}");
            assert_eq!(metadata.unwrap().resource_version.as_deref(), version, "{text}");
        }
    }

    #[test]
    fn a_list_is_split_wherever_its_objects_and_metadata_are() {
        check(r#"{"items":[]}"#, &[], None);
        check(r#"{"items":null,"metadata":{"resourceVersion":"7"}}"#, &[], Some("7"));
        check(
            "{\"metadata\":{\"resourceVersion\":\"7\"},\n\"items\" : [ {\"a\":1} ,\n{\"b\":[{}]}\n] }\n",
            &[json!({"a": 1}), json!({"b": [{}]})],
            Some("7"),
        );
        check(
            r#"{"items":[{"a":"}]\""},{}],"metadata":{"resourceVersion":"8"}}"#,
            &[json!({"a": "}]\""}), json!({})],
            Some("8"),
        );
        // Other members with that name, and values that look like it.
        check(
            r#"{"kind":"items","x":{"items":[{"no":1}]},"\"items":[{"no":2}],"items":[{"yes":1}]}"#,
            &[json!({"yes": 1})],
            None,
        );
    }

    #[test]
    fn an_array_among_the_objects_is_reported_however_it_arrives() {
        let text = br#"{"items":[[], {"a":1}],"metadata":{}}"#;
        for size in 1..text.len() {
            let mut list = ListItems::default();
            let parse = |it: &[u8]| serde_json::from_slice::<serde_json::Map<_, _>>(it).map(drop);
            let result = text.chunks(size).try_for_each(|it| list.read(it, parse));
            assert!(result.is_err(), "in fragments of {size}");
        }
    }

    #[test]
    fn a_list_that_is_cut_off_is_an_error() {
        let text = r#"{"metadata":{},"items":[{"a":1},{"b":2}]}"#;
        for length in 0..text.len() {
            assert!(split(&text[..length], 5).1.is_err(), "{}", &text[..length]);
        }
    }

    #[test]
    fn an_answer_without_objects_is_no_empty_list() {
        for text in ["{}", r#"{"status":"ok"}"#, r#"{"kind":"Status","metadata":{},"code":200}"#] {
            let (objects, metadata) = split(text, 7);
            assert!(objects.is_empty() && metadata.unwrap_err().contains("missing field `items`"), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_list_is_split_as_a_parser_splits_it(
            texts in prop::collection::vec("[\\PC\"{}\\[\\],:\\\\]{0,12}", 0..6),
            size in 1..40_usize,
            is_pretty: bool,
        ) {
            let objects: Vec<_> = texts.iter().map(|it| json!({it.as_str(): [it, {"items": [it]}]})).collect();
            let list = json!({"items": objects, "kind": texts.first(), "metadata": {"continue": "x"}});
            let text = if is_pretty { serde_json::to_string_pretty(&list) } else { serde_json::to_string(&list) };
            let (found, metadata) = split(&text.unwrap(), size);
            prop_assert_eq!(found, objects);
            prop_assert_eq!(metadata.unwrap().continue_, Some("x".to_owned()));
        }
    }
}
