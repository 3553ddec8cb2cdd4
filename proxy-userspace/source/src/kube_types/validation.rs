//! Reads single values and collects what is refused on the way.
//!
//! The one rule: every refusal names the object, the field, the value, and what would do.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU16,
    str::FromStr,
    sync::Arc,
};

use ipnet::IpNet;
use model::{Protocol, cluster::Rejected};

/// The longest name that Kubernetes gives an object.
const LONGEST_NAME: usize = 253;

/// The longest part of a value that a message quotes, in characters.
const LONGEST_QUOTE: usize = 60;

/// A value in quotes, or its beginning where it is long: a message stays readable, whatever an object holds.
pub(super) fn shown(text: &str) -> String {
    match cut(text) {
        Some(beginning) => format!("{beginning:?}… ({} bytes)", text.len()),
        None => format!("{text:?}"),
    }
}

/// A name as it is, or its beginning where it is longer than a name can be.
pub(super) fn short(name: &str) -> String {
    match cut(name).filter(|_| name.len() > LONGEST_NAME) {
        Some(beginning) => format!("{beginning}…"),
        None => name.to_owned(),
    }
}

fn cut(text: &str) -> Option<&str> {
    text.char_indices().nth(LONGEST_QUOTE).map(|(end, _)| &text[..end])
}

/// The refusals of one object.
#[derive(Debug)]
pub(super) struct Validator {
    object: String,
    rejected: Vec<Rejected>,
}

impl Validator {
    pub(super) fn new(object: String) -> Self {
        Self { object, rejected: Vec::new() }
    }

    pub(super) fn into_rejected(self) -> Vec<Rejected> {
        self.rejected
    }

    /// Notes down that `field` was refused.
    pub(super) fn push(&mut self, field: impl fmt::Display, reason: impl Into<String>) {
        self.rejected.push(Rejected { item: format!("{}: {field}", self.object), reason: reason.into() });
    }

    /// A name that can be part of a path: lower case letters, digits, `-` and `.`.
    pub(super) fn name(&mut self, field: impl fmt::Display, name: &str) -> Option<Arc<str>> {
        let fits = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-' || c == b'.';
        if name.is_empty() {
            self.push(field, "the object has no name; give it one");
            return None;
        }
        if name.len() > LONGEST_NAME || !name.bytes().all(fits) {
            let reason = format!(
                "{} is not a name; write at most {LONGEST_NAME} lower case letters, digits, `-` and `.`",
                shown(name)
            );
            self.push(field, reason);
            return None;
        }
        Some(name.into())
    }

    /// An address that something can be sent to.
    pub(super) fn address(&mut self, field: impl fmt::Display, text: &str) -> Option<IpAddr> {
        let Ok(address) = IpAddr::from_str(text) else {
            let hint = "write it as 192.0.2.1 (no leading zeros) or 2001:db8::1";
            self.push(field, format!("{} is not an IP address; {hint}", shown(text)));
            return None;
        };
        if address.is_unspecified() || address.is_multicast() || address == Ipv4Addr::BROADCAST {
            let reason =
                format!("{} is the address of no single host; write the address of one", shown(text));
            self.push(field, reason);
            return None;
        }
        Some(address)
    }

    /// A range of addresses; blanks around it are allowed.
    pub(super) fn range(&mut self, field: impl fmt::Display, text: &str) -> Option<IpNet> {
        match IpNet::from_str(text.trim()) {
            Ok(range) => Some(range.trunc()),
            Err(_) => {
                let reason = format!(
                    "{} is not a range of addresses; write it as 192.0.2.0/24 or 2001:db8::/32",
                    shown(text)
                );
                self.push(field, reason);
                None
            }
        }
    }

    /// A port from 1 to 65535.
    pub(super) fn port(&mut self, field: impl fmt::Display, number: i32) -> Option<NonZeroU16> {
        let port = u16::try_from(number).ok().and_then(NonZeroU16::new);
        if port.is_none() {
            self.push(field, format!("{number} is not a port; write a number from 1 to 65535"));
        }
        port
    }

    /// A protocol; TCP where none is written.
    pub(super) fn protocol(&mut self, field: impl fmt::Display, text: Option<&str>) -> Option<Protocol> {
        match text {
            None | Some("" | "TCP") => Some(Protocol::Tcp),
            Some("UDP") => Some(Protocol::Udp),
            Some("SCTP") => Some(Protocol::Sctp),
            Some(other) => {
                self.push(field, format!("{} is not a protocol; write TCP, UDP or SCTP", shown(other)));
                None
            }
        }
    }

    /// One of the words of an enumeration, or its default with a refusal.
    pub(super) fn word<T: Clone>(&mut self, field: &str, text: Option<&str>, words: &[(&str, T)]) -> T {
        let (first, default) = words.first().expect("an enumeration has words");
        let text = text.unwrap_or("");
        if text.is_empty() {
            return default.clone();
        }
        if let Some((_, value)) = words.iter().find(|(word, _)| *word == text) {
            return value.clone();
        }
        let known: Vec<_> = words.iter().map(|(word, _)| *word).collect();
        self.push(
            field,
            format!("{} is not known, {first} is used; write one of {}", shown(text), known.join(", ")),
        );
        default.clone()
    }
}
