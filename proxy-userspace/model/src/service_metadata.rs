//! Labels and annotations of Services, for backends with features of their own.
//!
//! Invariant: what is not requested is not kept, and what is kept would be accepted by an API server.

use std::{collections::BTreeMap, str::FromStr, sync::Arc};

use globset::{Glob, GlobMatcher};

use crate::NameForm;

/// Limit of the annotations of an object in Kubernetes, with their names, in bytes; here that of its labels as well.
const MAX_SIZE: usize = 256 << 10;

/// It contains the whole object as it was applied.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

const INVALID: &str =
    "no API server accepts this name or value; use at most 63 letters, digits, `-`, `_` and `.`";
const TOO_MUCH: &str = "all together are larger than 256 KiB, and this one is left out; shorten them";

/// The requested labels and annotations of a Service; there is at least one of either.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceMetadata {
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
}

/// Which labels and annotations of Services are requested; by default none.
#[derive(Clone, Debug, Default)]
pub struct RequestedMetadata {
    labels: Vec<NamePattern>,
    annotations: Vec<NamePattern>,
}

impl RequestedMetadata {
    /// Those whose names match any of the patterns; an empty pattern, as of an empty environment variable, is none.
    pub fn new(mut labels: Vec<NamePattern>, mut annotations: Vec<NamePattern>) -> Self {
        labels.retain(|it| !it.text().is_empty());
        annotations.retain(|it| !it.text().is_empty());
        Self { labels, annotations }
    }

    /// All that there are, however large.
    pub fn everything() -> Self {
        let all = ["*", LAST_APPLIED].map(|it| it.parse().expect("it is a glob")).to_vec();
        Self::new(all.clone(), all)
    }

    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.annotations.is_empty()
    }

    /// The requested ones of a Service, if there are any.
    ///
    /// `reject` takes the field, the name and the reason of those that an API server would refuse.
    pub fn select(
        &self,
        labels: &BTreeMap<String, String>,
        annotations: &BTreeMap<String, String>,
        mut reject: impl FnMut(&'static str, &str, &str),
    ) -> Option<Arc<ServiceMetadata>> {
        let label = |name: &str, value: &str| {
            let is_value = value.is_empty() || NameForm::LabelValue.accepts(value);
            NameForm::QualifiedName.accepts(name) && is_value
        };
        // Kubernetes ignores the case of an annotation's domain.
        let annotation = |name: &str, _: &str| NameForm::QualifiedName.accepts(&name.to_ascii_lowercase());
        let found = ServiceMetadata {
            labels: select(&self.labels, labels, label, |name, reason| reject("labels", name, reason)),
            annotations: select(&self.annotations, annotations, annotation, |name, reason| {
                reject("annotations", name, reason);
            }),
        };
        (found != ServiceMetadata::default()).then(|| Arc::new(found))
    }
}

/// Those that match a pattern, are valid, and fit.
fn select(
    patterns: &[NamePattern],
    all: &BTreeMap<String, String>,
    is_valid: impl Fn(&str, &str) -> bool,
    mut reject: impl FnMut(&str, &str),
) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut size = 0;
    for (name, value) in all.iter().filter(|(name, _)| patterns.iter().any(|it| it.matches(name))) {
        if !is_valid(name, value) {
            reject(name, INVALID);
        } else if size + name.len() + value.len() > MAX_SIZE {
            reject(name, TOO_MUCH);
        } else {
            size += name.len() + value.len();
            found.insert(name.clone(), value.clone());
        }
    }
    found
}

/// A pattern of names of labels or annotations: a glob whose `*` matches any text.
#[derive(Clone, Debug)]
pub struct NamePattern(GlobMatcher);

impl FromStr for NamePattern {
    type Err = globset::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(Glob::new(text)?.compile_matcher()))
    }
}

impl NamePattern {
    /// Whether it has this name, or matches it; kubectl's copy of the object has no other pattern than its name.
    fn matches(&self, name: &str) -> bool {
        self.text() == name || (name != LAST_APPLIED && self.0.is_match(name))
    }

    fn text(&self) -> &str {
        self.0.glob().glob()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patterns(texts: &[&str]) -> Vec<NamePattern> {
        texts.iter().map(|it| it.parse().unwrap()).collect()
    }

    fn map(items: &[(&str, &str)]) -> BTreeMap<String, String> {
        items.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    /// The requested labels and annotations of a Service with `items` as both, and what was rejected.
    fn select(
        requested: &RequestedMetadata,
        items: &BTreeMap<String, String>,
    ) -> (Option<Arc<ServiceMetadata>>, Vec<String>) {
        let mut rejected = Vec::new();
        let found = requested
            .select(items, items, |field, name, reason| rejected.push(format!("{field} {name}: {reason}")));
        (found, rejected)
    }

    #[track_caller]
    fn check(texts: &[&str], expect: &[&str]) {
        let names = ["app", "app.kubernetes.io/name", "example.com/tier", LAST_APPLIED];
        let items = map(&names.map(|it| (it, "x")));
        let requested = RequestedMetadata::new(Vec::new(), patterns(texts));
        let found = select(&requested, &items).0.unwrap_or_default();
        assert!(found.labels.is_empty());
        assert_eq!(found.annotations.keys().collect::<Vec<_>>(), expect, "{texts:?}");
    }

    #[test]
    fn a_pattern_is_a_name_or_a_glob_of_the_whole_name() {
        check(&["app"], &["app"]);
        check(&["app", "example.com/tier", "none"], &["app", "example.com/tier"]);
        check(&["app*"], &["app", "app.kubernetes.io/name"]);
        check(&["*/name", "ex?mple.[a-c]*"], &["app.kubernetes.io/name", "example.com/tier"]);
        check(&["name"], &[]);
        assert!("a[".parse::<NamePattern>().is_err());
    }

    #[test]
    fn the_copy_of_the_object_that_kubectl_keeps_is_requested_by_its_name_only() {
        check(&["*", "kubectl.kubernetes.io/*"], &["app", "app.kubernetes.io/name", "example.com/tier"]);
        check(&[LAST_APPLIED], &[LAST_APPLIED]);
        let all = select(&RequestedMetadata::everything(), &map(&[(LAST_APPLIED, "x")])).0.unwrap();
        assert_eq!((all.labels.len(), all.annotations.len()), (1, 1));
    }

    #[test]
    fn nothing_is_kept_of_a_service_that_has_nothing_requested() {
        let requested = RequestedMetadata::new(patterns(&["app"]), patterns(&["app"]));
        assert!(!requested.is_empty() && RequestedMetadata::default().is_empty());
        assert!(!RequestedMetadata::new(patterns(&["app"]), Vec::new()).is_empty());
        assert!(!RequestedMetadata::new(Vec::new(), patterns(&["app"])).is_empty());
        assert!(RequestedMetadata::new(patterns(&[""]), patterns(&["", ""])).is_empty());
        assert_eq!(select(&requested, &map(&[("other", "x")])), (None, Vec::new()));
        assert_eq!(select(&RequestedMetadata::default(), &map(&[("app", "x")])), (None, Vec::new()));
    }

    #[test]
    fn what_an_api_server_would_refuse_is_rejected_alone() {
        let items =
            map(&[("app", ""), ("a b", "x"), ("Example.com/a", "x"), ("text", "two words\n\u{1b}[2J")]);
        let (found, rejected) = select(&RequestedMetadata::everything(), &items);
        let found = found.unwrap();
        assert_eq!(found.labels.keys().collect::<Vec<_>>(), ["app"]);
        assert_eq!(found.annotations.keys().collect::<Vec<_>>(), ["Example.com/a", "app", "text"]);
        let of = |field: &str, name: &str| format!("{field} {name}: {INVALID}");
        let labels = ["Example.com/a", "a b", "text"].map(|it| of("labels", it));
        assert_eq!(rejected, [&labels[..], &[of("annotations", "a b")]].concat());
    }

    #[test]
    fn the_size_of_what_is_kept_is_bounded() {
        let half = "x".repeat(MAX_SIZE / 2);
        let items = map(&[("a", &half), ("b", &half), ("c", "fits")]);
        let requested = RequestedMetadata::new(Vec::new(), patterns(&["*"]));
        let (found, rejected) = select(&requested, &items);
        assert_eq!(found.unwrap().annotations.keys().collect::<Vec<_>>(), ["a", "c"]);
        assert_eq!(rejected, [format!("annotations b: {TOO_MUCH}")]);
        let rest = "x".repeat(MAX_SIZE / 2 - 1);
        let (found, rejected) = select(&requested, &map(&[("a", &rest), ("b", &rest), ("c", "")]));
        assert_eq!(found.unwrap().annotations.keys().collect::<Vec<_>>(), ["a", "b"], "just as large");
        assert_eq!(rejected, [format!("annotations c: {TOO_MUCH}")]);
        // Those that are not requested do not count.
        let requested = RequestedMetadata::new(Vec::new(), patterns(&["b"]));
        assert_eq!(select(&requested, &items).1, [""; 0]);
    }
}
