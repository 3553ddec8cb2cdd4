//! The names that may have been meant.

use std::fmt::Display;

/// How many names are proposed.
const MAX_PROPOSED: usize = 3;
/// How similar a proposed name is at least; 1 is equal.
const MIN_SIMILARITY: f64 = 0.75;

/// The names that are most similar to a text, best first.
pub(super) fn nearest<T: Display>(text: &str, names: impl IntoIterator<Item = T>) -> Vec<String> {
    let similarity = |name: T| {
        let name = name.to_string();
        (strsim::jaro_winkler(text, &name), name)
    };
    let mut similar: Vec<_> =
        names.into_iter().map(similarity).filter(|(it, _)| *it >= MIN_SIMILARITY).collect();
    similar.sort_by(|(a, a_name), (b, b_name)| b.total_cmp(a).then_with(|| a_name.cmp(b_name)));
    similar.truncate(MAX_PROPOSED);
    similar.into_iter().map(|(_, name)| name).collect()
}

/// The end of a message about an unknown name: the most similar ones, if there are any.
pub(super) fn did_you_mean<T: Display>(text: &str, names: impl IntoIterator<Item = T>) -> String {
    match &nearest(text, names)[..] {
        [] => String::new(),
        names => format!("; nearest: {}", names.join(", ")),
    }
}
