//! The forms of names that Kubernetes' API server accepts (`k8s.io/apimachinery/pkg/util/validation`).
//!
//! Invariant: every accepted name is printable ASCII, so that it can be part of a path, a log line or a terminal's output.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameForm {
    /// Of Services, namespaces, hosts and service ports: RFC 1123's label.
    DnsLabel,
    /// Of all other objects: labels that are joined by dots.
    DnsSubdomain,
    /// The value of a label, such as a zone.
    LabelValue,
    /// A label value that may have a DNS subdomain and `/` before it, such as a zone in a hint.
    QualifiedName,
    /// Of a container port (RFC 6335's service name).
    PortName,
    /// Any printable ASCII without blanks, for keys that other brains invent.
    Key,
}

impl NameForm {
    /// Whether `name` has this form; an empty one has none.
    pub fn accepts(self, name: &str) -> bool {
        let is_lower = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit();
        match self {
            Self::DnsLabel => name.len() <= 63 && is_enclosed(name, is_lower, b"-"),
            Self::DnsSubdomain => {
                name.len() <= 253 && name.split('.').all(|it| is_enclosed(it, is_lower, b"-"))
            }
            Self::LabelValue => {
                name.len() <= 63 && is_enclosed(name, |it| it.is_ascii_alphanumeric(), b"-_.")
            }
            Self::QualifiedName => match name.split_once('/') {
                Some((prefix, name)) => Self::DnsSubdomain.accepts(prefix) && Self::LabelValue.accepts(name),
                None => Self::LabelValue.accepts(name),
            },
            Self::PortName => {
                name.len() <= 15
                    && is_enclosed(name, is_lower, b"-")
                    && name.contains(|it: char| it.is_ascii_lowercase())
                    && !name.contains("--")
            }
            Self::Key => (1..=512).contains(&name.len()) && name.bytes().all(|it| it.is_ascii_graphic()),
        }
    }

    /// What a name must be, as the end of a message.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::DnsLabel => "use at most 63 lower-case letters, digits and `-`",
            Self::DnsSubdomain => "use at most 253 lower-case letters, digits, `-` and `.`",
            Self::LabelValue | Self::QualifiedName => "use at most 63 letters, digits, `-`, `_` and `.`",
            Self::PortName => "use at most 15 lower-case letters, digits and `-`",
            Self::Key => "use at most 512 printable characters without blanks",
        }
    }
}

/// Whether every byte is allowed, and the first and last are none of `inner`.
fn is_enclosed(name: &str, is_outer: impl Fn(u8) -> bool, inner: &[u8]) -> bool {
    let bytes = name.as_bytes();
    bytes.first().is_some_and(|it| is_outer(*it))
        && bytes.last().is_some_and(|it| is_outer(*it))
        && bytes.iter().all(|it| is_outer(*it) || inner.contains(it))
}

#[cfg(test)]
mod tests {
    use super::NameForm::{self, *};

    #[track_caller]
    fn check(name: &str, expect: &[NameForm]) {
        let all = [DnsLabel, DnsSubdomain, LabelValue, QualifiedName, PortName, Key];
        let found: Vec<_> = all.into_iter().filter(|it| it.accepts(name)).collect();
        assert_eq!(found, expect, "{name:?}");
    }

    #[test]
    fn each_form_accepts_what_an_api_server_accepts() {
        check("web-1", &[DnsLabel, DnsSubdomain, LabelValue, QualifiedName, PortName, Key]);
        check("10", &[DnsLabel, DnsSubdomain, LabelValue, QualifiedName, Key]);
        check("a--b", &[DnsLabel, DnsSubdomain, LabelValue, QualifiedName, Key]);
        check("a.b", &[DnsSubdomain, LabelValue, QualifiedName, Key]);
        check("Zone_A", &[LabelValue, QualifiedName, Key]);
        check("example.com/zone", &[QualifiedName, Key]);
        check("web-1+2|x", &[Key]);
        check(&"x".repeat(63), &[DnsLabel, DnsSubdomain, LabelValue, QualifiedName, Key]);
        check(&"x".repeat(64), &[DnsSubdomain, Key]);
        check(&"x".repeat(254), &[Key]);
    }

    #[test]
    fn a_remedy_names_the_longest_name_that_is_accepted() {
        for form in [DnsLabel, DnsSubdomain, LabelValue, QualifiedName, PortName, Key] {
            let longest = form.remedy().split(' ').find_map(|it| it.parse().ok()).unwrap();
            let accepted = [longest, longest + 1].map(|it| form.accepts(&"x".repeat(it)));
            assert_eq!(accepted, [true, false], "{form:?}");
        }
    }

    #[test]
    fn no_form_accepts_an_empty_name_or_one_that_is_not_printable() {
        for name in ["", "a b", "a\n", "a\u{1b}[2J", "a\u{9b}2J", "a\u{7f}", "\u{202e}a", "ä", "a\u{2028}"] {
            check(name, &[]);
        }
        for name in ["-a", "a-", ".a", "a..b"] {
            assert!(
                ![DnsLabel, DnsSubdomain, LabelValue].iter().any(|it| it.accepts(name) && name != "a..b")
            );
            assert!(!DnsSubdomain.accepts(name), "{name}");
        }
    }
}
