//! Texts of unknown length in messages of bounded length.

use model::escaped_line;

/// The text in one line, with single blanks and without control characters.
pub(crate) fn one_line(text: &str) -> String {
    escaped_line(&text.split_whitespace().collect::<Vec<_>>().join(" ")).into_owned()
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
