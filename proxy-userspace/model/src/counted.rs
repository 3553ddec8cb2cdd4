//! Numbers of things in messages.

use std::fmt::Display;

/// A number of things as text, such as `1 endpoint` or `2 endpoints`.
pub fn counted(number: impl Display + PartialEq + From<u8>, noun: &str) -> String {
    let plural = if number == 1.into() { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_in_the_singular() {
        assert_eq!([0, 1, 2].map(|it: usize| counted(it, "node")), ["0 nodes", "1 node", "2 nodes"]);
    }
}
