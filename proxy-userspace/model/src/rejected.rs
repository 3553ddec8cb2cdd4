//! Parts of the input that are not served, or not as they are written.

use std::fmt;

use crate::ServiceName;

/// How many parts of one object are listed.
const MAX_LISTED: usize = 100;

/// One rejected part of an object; the rest of the object is served.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rejected {
    /// The object and the field.
    pub item: String,
    /// Why it was rejected, with the value, and what would be accepted.
    pub reason: String,
    /// What becomes of it.
    pub effect: Effect,
}

/// What becomes of a rejected part.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effect {
    /// It is not served.
    NotServed,
    /// It is served, perhaps with a default; the reason says how.
    Served,
    /// It is an annotation of this Service, which is served without it.
    AnnotationIgnored(ServiceName),
}

impl Rejected {
    /// What is not served, and why.
    pub fn not_served(item: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { item: item.into(), reason: reason.into(), effect: Effect::NotServed }
    }

    /// What is served differently than it may be meant, and why.
    pub fn served(item: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { item: item.into(), reason: reason.into(), effect: Effect::Served }
    }

    /// The line of a log.
    pub fn log_line(&self) -> String {
        let prefix = if self.effect == Effect::NotServed { "not served: " } else { "" };
        format!("{prefix}{self}")
    }
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
    pub fn push(&mut self, field: impl fmt::Display, reason: impl Into<String>, effect: Effect) {
        self.count += 1;
        if self.count <= MAX_LISTED {
            let item = format!("{}: {field}", self.object);
            self.listed.push(Rejected { item, reason: reason.into(), effect });
        }
    }

    /// The list; those that it does not contain are one item.
    pub fn into_list(mut self) -> Vec<Rejected> {
        if let Some(more @ 1..) = self.count.checked_sub(MAX_LISTED) {
            self.listed.push(Rejected::not_served(self.object, format!("{more} more parts were rejected")));
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
        (0..MAX_LISTED + 7).for_each(|it| parts.push(it, "no", Effect::NotServed));
        let list = parts.into_list();
        assert_eq!(list.len(), MAX_LISTED + 1);
        assert_eq!(list[1].log_line(), "not served: Service a/b: 1: no");
        assert_eq!(list[MAX_LISTED].to_string(), "Service a/b: 7 more parts were rejected");
    }
}
