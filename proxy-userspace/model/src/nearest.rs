//! The names that may have been meant.

use std::fmt::Display;

const MAX_PROPOSED: usize = 3;

/// The names that are most similar to a text, best first; none of a lower similarity than this, of which 1 is equal.
pub fn nearest<T: Display>(
    text: &str,
    names: impl IntoIterator<Item = T>,
    min_similarity: f64,
) -> Vec<String> {
    let similarity = |name: T| {
        let name = name.to_string();
        (strsim::jaro_winkler(text, &name), name)
    };
    let mut similar: Vec<_> =
        names.into_iter().map(similarity).filter(|(it, _)| *it >= min_similarity).collect();
    similar.sort_by(|(a, a_name), (b, b_name)| b.total_cmp(a).then_with(|| a_name.cmp(b_name)));
    similar.truncate(MAX_PROPOSED);
    similar.into_iter().map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_similar_names_are_proposed() {
        let names = ["db", "web-4", "web-3", "web-2", "web-1"];
        assert_eq!(nearest("web", names, 0.8), ["web-1", "web-2", "web-3"], "as similar, by name");
        assert_eq!(nearest("web-2", names, 0.8), ["web-2", "web-1", "web-3"], "the best one first");
        assert_eq!(nearest("web-2", names, 1.0), ["web-2"]);
        assert_eq!(nearest("cache", names, 0.8), [""; 0]);
    }
}
