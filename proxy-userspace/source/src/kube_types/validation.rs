//! Validates single values, and collects the rejected ones.
//!
//! Invariant: every rejection names the object, the field, the value and the remedy.

use std::{fmt, net::IpAddr, num::NonZeroU16, sync::Arc};

use ipnet::IpNet;
use model::{
    Effect, NameForm, Protocol, Rejected, RejectedParts, ServiceName,
    address::{self, AddressUse},
    nearest,
};

use super::objects::PREFIX;
use crate::text::prefix;

/// Limit of the name of a Kubernetes object.
const MAX_NAME: usize = 253;

/// How much of a value a message quotes, in characters.
const MAX_QUOTE: usize = 60;

/// A value in quotes, shortened so that messages stay readable.
pub(super) fn quoted(text: &str) -> String {
    match prefix(text, MAX_QUOTE) {
        Some(start) => format!("{start:?}… ({} bytes)", text.len()),
        None => format!("{text:?}"),
    }
}

/// From which similarity on a known name may be meant.
const MIN_SIMILARITY: f64 = 0.7;

/// What is said of an annotation with our prefix that is none of the known ones: which of them may be meant, or else `otherwise`.
pub(super) fn unknown_annotation(name: &str, known: &[&str], otherwise: &str) -> String {
    match nearest(name, known, MIN_SIMILARITY).first() {
        Some(it) => format!("is unknown, and ignored; did you mean {PREFIX}{it}?"),
        None => format!("is unknown, and ignored; {otherwise}"),
    }
}

/// A name, escaped, and shortened if it is longer than a valid one.
pub(super) fn short(name: &str) -> String {
    match prefix(name, MAX_QUOTE).filter(|_| name.len() > MAX_NAME) {
        Some(start) => format!("{}…", start.escape_debug()),
        None => name.escape_debug().to_string(),
    }
}

#[derive(Debug)]
pub(super) struct Validator(RejectedParts);

impl Validator {
    pub(super) fn new(object: String) -> Self {
        Self(RejectedParts::of(object))
    }

    pub(super) fn into_rejected(self) -> Vec<Rejected> {
        self.0.into_list()
    }

    /// Rejects `field`, which is not served.
    pub(super) fn reject(&mut self, field: impl fmt::Display, reason: impl Into<String>) {
        self.0.push(field, reason, Effect::NotServed);
    }

    /// Rejects `field`, which is served as the reason says.
    pub(super) fn report(&mut self, field: impl fmt::Display, reason: impl Into<String>) {
        self.0.push(field, reason, Effect::Served);
    }

    pub(super) fn ignore_annotation(
        &mut self,
        service: &ServiceName,
        annotation: impl fmt::Display,
        reason: impl Into<String>,
    ) {
        let effect = Effect::AnnotationIgnored(service.clone());
        self.0.push(format_args!("metadata.annotations[{annotation}]"), reason, effect);
    }

    /// A valid value; rejects `field` without one.
    fn require<T>(
        &mut self,
        field: impl fmt::Display,
        value: Option<T>,
        reason: impl FnOnce() -> String,
    ) -> Option<T> {
        if value.is_none() {
            self.reject(field, reason());
        }
        value
    }

    pub(super) fn name(&mut self, field: impl fmt::Display, name: &str, form: NameForm) -> Option<Arc<str>> {
        self.require(field, form.accepts(name).then(|| name.into()), || match name {
            "" => "the object has no name; give it one".to_owned(),
            _ => format!("{} is not such a name; {}", quoted(name), form.remedy()),
        })
    }

    /// A name that may be missing or empty; an invalid one is rejected, and as if it were missing.
    pub(super) fn optional_name(
        &mut self,
        field: impl fmt::Display,
        name: Option<&str>,
        form: NameForm,
    ) -> Option<Arc<str>> {
        self.name(field, name.filter(|it| !it.is_empty())?, form)
    }

    /// The first `max` items; rejects the others.
    pub(super) fn limited<'a, T>(
        &mut self,
        field: impl fmt::Display,
        items: Option<&'a [T]>,
        max: usize,
    ) -> &'a [T] {
        let items = items.unwrap_or_default();
        if items.len() > max {
            let reason = format!("there are {}, and the first {max} are used; use more objects", items.len());
            self.reject(field, reason);
        }
        items.get(..max).unwrap_or(items)
    }

    /// An address of one host. What kube-proxy reads although an API server would refuse it is read the same way, and
    /// reported.
    pub(super) fn address(
        &mut self,
        field: impl fmt::Display,
        text: &str,
        used_as: AddressUse,
    ) -> Option<IpAddr> {
        let as_written = text.parse::<IpAddr>().ok().filter(|it| *it == it.to_canonical());
        let Some(address) = as_written.or_else(|| address::parse(text)) else {
            let text = quoted(text);
            let reason = "is not an IP address; write it as 192.0.2.1 or 2001:db8::1";
            self.reject(field, format!("{text} {reason}"));
            return None;
        };
        let refusal = address::refusal(address, used_as);
        if let Some(reason) = refusal {
            self.reject(field, format!("{} {reason}", quoted(text)));
        } else if as_written.is_none() {
            self.report(field, format!("{} is read as {address}; write it so", quoted(text)));
        }
        refusal.is_none().then_some(address)
    }

    /// A CIDR, which may be surrounded by blanks.
    pub(super) fn cidr(&mut self, field: impl fmt::Display, text: &str) -> Option<IpNet> {
        self.require(field, address::parse_range(text.trim()), || {
            format!("{} is not a CIDR; write it as 192.0.2.0/24 or 2001:db8::/32", quoted(text))
        })
    }

    /// A port from 1 to 65535.
    pub(super) fn port(&mut self, field: impl fmt::Display, number: i32) -> Option<NonZeroU16> {
        let port = u16::try_from(number).ok().and_then(NonZeroU16::new);
        self.require(field, port, || format!("{number} is not a port; use a number from 1 to 65535"))
    }

    /// A protocol, TCP by default.
    pub(super) fn protocol(&mut self, field: impl fmt::Display, text: Option<&str>) -> Option<Protocol> {
        let text = text.unwrap_or_default();
        let protocol = match text {
            "" | "TCP" => Some(Protocol::Tcp),
            "UDP" => Some(Protocol::Udp),
            "SCTP" => Some(Protocol::Sctp),
            _ => None,
        };
        self.require(field, protocol, || format!("{} is not a protocol; use TCP, UDP or SCTP", quoted(text)))
    }

    /// A value of an enumeration. The first one is the default, and replaces an unknown one.
    pub(super) fn one_of<T: Copy>(&mut self, field: &str, text: Option<&str>, values: &[(&str, T)]) -> T {
        one_of(text.unwrap_or_default(), values, |reason| self.report(field, reason))
    }
}

/// The value of a word. The first one is the default, and replaces an unknown one, of which `report` takes the reason.
pub(super) fn one_of<T: Copy>(text: &str, values: &[(&str, T)], report: impl FnOnce(String)) -> T {
    let (default_name, default) = *values.first().expect("an enumeration has values");
    if text.is_empty() {
        return default;
    }
    if let Some((_, value)) = values.iter().find(|(name, _)| *name == text) {
        return *value;
    }
    let names: Vec<_> = values.iter().map(|(name, _)| *name).collect();
    let names = names.join(", ");
    report(format!("{} is unknown, {default_name} is used; use one of {names}", quoted(text)));
    default
}
