//! Texts that someone else has written, for a log, a terminal or a page.

use std::borrow::Cow;

/// The text with every character escaped that a terminal does not print as itself, except for line feeds: control
/// characters, escape sequences, and characters that change the direction or order of text.
///
/// The escapes are those of JSON: a JSON document stays the same document.
pub fn escaped(text: &str) -> Cow<'_, str> {
    escape(text, |it| it != '\n' && !is_printable(it))
}

/// Like [`escaped`], with line feeds escaped as well.
pub fn escaped_line(text: &str) -> Cow<'_, str> {
    escape(text, |it| !is_printable(it))
}

/// Letters and marks of all scripts are printable; format characters, separators and unassigned ones are not.
fn is_printable(it: char) -> bool {
    match it {
        '\0'..='\u{7f}' => !it.is_ascii_control(),
        // After a letter, as marks are.
        '\u{80}'.. => String::from_iter(['x', it]).escape_debug().nth(1) == Some(it),
    }
}

fn escape(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for it in text.chars() {
        match it {
            _ if !is_escaped(it) => out.push(it),
            '\n' => out.push_str("\\n"),
            _ => out.extend(it.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}"))),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_a_terminal_interprets_is_escaped() {
        for (text, expect) in [
            ("plain – „ä“ 1 < 2", "plain – „ä“ 1 < 2"),
            ("e\u{301} \u{16af0}", "e\u{301} \u{16af0}"),
            ("\u{1b}[2J", "\\u001b[2J"),
            ("\u{9b}2J\u{7f}", "\\u009b2J\\u007f"),
            ("a\u{202e}b\u{2066}c\u{200f}", "a\\u202eb\\u2066c\\u200f"),
            ("\u{2028}\u{feff}\u{200b}", "\\u2028\\ufeff\\u200b"),
            ("\u{e0041}", "\\udb40\\udc41"),
            ("a\tb\rc", "a\\u0009b\\u000dc"),
            ("a\nb", "a\nb"),
        ] {
            assert_eq!(escaped(text), expect);
        }
        assert_eq!(escaped_line("a\nb"), "a\\nb");
    }

    proptest! {
        #[test]
        fn no_control_character_remains(text in any::<String>()) {
            prop_assert!(!escaped_line(&text).contains(char::is_control));
            prop_assert!(!escaped(&text).contains(|it: char| it != '\n' && it.is_control()));
            let again = escaped(&text);
            prop_assert_eq!(escaped(&again), again.as_ref());
        }
    }
}
