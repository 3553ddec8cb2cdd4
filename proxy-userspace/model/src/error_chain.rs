//! Errors as text.

use std::error::Error;

/// An error and its causes in one line. A cause whose text was there already is left out, as many errors repeat it.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let part = cause.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        next = cause.source();
    }
    text
}
