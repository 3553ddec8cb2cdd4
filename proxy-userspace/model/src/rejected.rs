//! Parts of the input that are not served.

use std::fmt;

/// How many parts of one object are listed.
const MAX_LISTED: usize = 100;

/// One rejected part of an object; the rest of the object is served without it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rejected {
    /// The object and the field.
    pub item: String,
    /// Why it was rejected, with the value, and what would be accepted.
    pub reason: String,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.item, self.reason)
    }
}

/// The rejected parts of one object. The list is bounded, whatever the object contains.
#[derive(Clone, Debug)]
pub struct RejectedParts {
    object: String,
    listed: Vec<Rejected>,
    count: usize,
}

impl RejectedParts {
    /// Those of an object, by its kind and name as a message names it.
    pub fn of(object: String) -> Self {
        Self { object, listed: Vec::new(), count: 0 }
    }

    /// Rejects a field.
    pub fn push(&mut self, field: impl fmt::Display, reason: impl Into<String>) {
        self.count += 1;
        if self.count <= MAX_LISTED {
            self.listed.push(Rejected { item: format!("{}: {field}", self.object), reason: reason.into() });
        }
    }

    /// The list; those that it does not contain are one item.
    pub fn into_list(mut self) -> Vec<Rejected> {
        if let Some(more @ 1..) = self.count.checked_sub(MAX_LISTED) {
            self.listed
                .push(Rejected { item: self.object, reason: format!("{more} more parts were rejected") });
        }
        self.listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_bounded_and_says_so() {
        let mut parts = RejectedParts::of("Service a/b".into());
        (0..MAX_LISTED + 7).for_each(|it| parts.push(it, "no"));
        let list = parts.into_list();
        assert_eq!(list.len(), MAX_LISTED + 1);
        assert_eq!(list[1].to_string(), "Service a/b: 1: no");
        assert_eq!(list[MAX_LISTED].to_string(), "Service a/b: 7 more parts were rejected");
    }
}
