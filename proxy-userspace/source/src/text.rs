//! Texts of unknown length in messages of bounded length.

use std::error::Error;

/// The text in one line, with single blanks.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The first `max` characters of a longer text.
pub(crate) fn prefix(text: &str, max: usize) -> Option<&str> {
    text.char_indices().nth(max).map(|(end, _)| &text[..end])
}

/// The text, cut off after `max` characters.
pub(crate) fn shortened(text: String, max: usize) -> String {
    match prefix(&text, max) {
        Some(start) => format!("{start}…"),
        None => text,
    }
}

/// An error and its causes in one line, without repetitions.
pub(crate) fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let part = error.to_string();
        if text.is_empty() {
            text = part;
        } else if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        next = error.source();
    }
    text
}
