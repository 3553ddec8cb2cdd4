//! Parts of the input that are not served, or not as they are written.

use std::{fmt, sync::Arc};

use crate::{
    ServiceName,
    object_map::{Keyed, ObjectMap},
};

/// How many parts of one object are listed.
const MAX_LISTED: usize = 100;

/// One rejected part of an object; the rest of the object is served.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rejected {
    /// The object and the field.
    pub item: String,
    /// Why it was rejected, with the value, and what would be accepted.
    pub reason: String,
    pub effect: Effect,
}

/// What becomes of a rejected part.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effect {
    NotServed,
    /// It is served, perhaps with a default; the reason says how.
    Served,
    /// It is an annotation of this Service, which is served without it.
    AnnotationIgnored(ServiceName),
    /// It is a Service, which is not served because it does not fit into its namespace.
    OverLimit {
        service: ServiceName,
        /// The first node with an endpoint of it: of all nodes the one that reports it.
        node: Option<Arc<str>>,
    },
}

impl Rejected {
    pub fn not_served(item: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { item: item.into(), reason: reason.into(), effect: Effect::NotServed }
    }

    /// What is served differently than it may be meant, and why.
    pub fn served(item: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { item: item.into(), reason: reason.into(), effect: Effect::Served }
    }

    /// Whether it is served, though differently than it may be meant.
    pub fn is_served(&self) -> bool {
        matches!(self.effect, Effect::Served | Effect::AnnotationIgnored(_))
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
    /// No parts yet, of an object by its kind and name as a message names it.
    pub fn of(object: String) -> Self {
        Self { object, listed: Vec::new(), count: 0 }
    }

    pub fn push(&mut self, field: impl fmt::Display, reason: impl Into<String>, effect: Effect) {
        self.push_with(field, || reason.into(), effect);
    }

    /// Rejects a field, and asks for the reason only if it is listed.
    pub fn push_with(&mut self, field: impl fmt::Display, reason: impl FnOnce() -> String, effect: Effect) {
        self.count += 1;
        if self.count <= MAX_LISTED {
            let item = format!("{}: {field}", self.object);
            self.listed.push(Rejected { item, reason: reason(), effect });
        }
    }

    /// The list; those that it does not contain are one item.
    pub fn into_list(mut self) -> Vec<Rejected> {
        if let Some(more @ 1..) = self.count.checked_sub(MAX_LISTED) {
            self.listed.push(Rejected::not_served(
                self.object,
                format!("rejected as well: {}", crate::counted(more, "more part")),
            ));
        }
        self.listed
    }
}

/// What is rejected of many objects. Copies share what did not change, and a change costs what it touches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rejections {
    objects: ObjectMap<RejectedObject>,
    count: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedObject {
    /// The kind and the name of the object.
    pub object: Arc<str>,
    /// At least one.
    pub parts: Vec<Rejected>,
}

impl Keyed for RejectedObject {
    type Key = Arc<str>;

    fn key(&self) -> &Arc<str> {
        &self.object
    }
}

impl Rejections {
    /// Replaces what is rejected of an object.
    pub fn set(&mut self, object: &str, parts: Vec<Rejected>) {
        self.count += parts.len();
        let before = match parts.is_empty() {
            true => self.objects.remove(object),
            false => self.objects.insert(RejectedObject { object: object.into(), parts }),
        };
        self.count -= before.map_or(0, |it| it.parts.len());
    }

    /// The number of parts.
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether both are the same in memory: nothing was changed between them.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        self.objects.ptr_eq(&other.objects)
    }

    /// All parts, by object.
    pub fn iter(&self) -> impl Iterator<Item = &Rejected> + Clone {
        self.objects.iter().flat_map(|(_, it)| &it.parts)
    }

    /// Like [`iter`](Self::iter), for a reader that outlives the reference.
    pub fn into_parts(self) -> impl Iterator<Item = Rejected> {
        self.objects.into_values().flat_map(|it| it.parts.clone())
    }

    /// The parts that were not rejected before. If one is made from the other, the cost is proportional to the difference.
    pub fn new_since<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = &'a Rejected> {
        self.objects.diff(&before.objects).flat_map(|(_, before, after)| {
            let is_new = move |it: &&Rejected| before.is_none_or(|before| !before.parts.contains(it));
            after.into_iter().flat_map(|it| &it.parts).filter(is_new)
        })
    }
}

impl FromIterator<Rejected> for Rejections {
    /// Each part counts as an object of its own.
    fn from_iter<I: IntoIterator<Item = Rejected>>(parts: I) -> Self {
        let mut all = Self::default();
        for it in parts {
            all.set(&it.to_string(), vec![it]);
        }
        all
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
        assert!(!list[1].is_served());
        assert_eq!(list[MAX_LISTED].to_string(), "Service a/b: rejected as well: 7 more parts");
    }

    #[test]
    fn rejections_know_what_is_new_and_how_many_there_are() {
        let part = |field: &str| Rejected::not_served(format!("Service a/b: {field}"), "no");
        let mut all = Rejections::default();
        all.set("Service a/b", vec![part("x"), part("y")]);
        all.set("Service c/d", vec![part("z")]);
        let before = all.clone();
        all.set("Service a/b", vec![part("y"), part("w")]);
        all.set("Service c/d", Vec::new());
        assert_eq!(all.new_since(&before).collect::<Vec<_>>(), [&part("w")]);
        assert_eq!((before.len(), all.len(), all.iter().count()), (3, 2, 2));
        all.set("Service a/b", Vec::new());
        assert!(all.is_empty() && all == Rejections::default());
    }
}
