//! What a message about an unknown name proposes.

use std::fmt::Display;

use model::nearest;

/// How similar a proposed name is at least; 1 is equal.
const MIN_SIMILARITY: f64 = 0.75;

/// The end of a message about an unknown name: the most similar ones, if there are any.
pub(super) fn did_you_mean<T: Display>(text: &str, names: impl IntoIterator<Item = T>) -> String {
    match &nearest(text, names, MIN_SIMILARITY)[..] {
        [] => String::new(),
        names => format!("; nearest: {}", names.join(", ")),
    }
}
