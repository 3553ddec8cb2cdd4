//! Parses single fields of messages and collects what is rejected.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU16,
    str::FromStr,
    sync::Arc,
};

use model::{
    Effect, NameForm, Protocol, Rejected, RejectedParts, Rejections,
    address::{self, AddressUse},
};
use proxy_contract::localv1;

/// The number of characters of a peer's text that a log line shows.
const MAX_SHOWN_TEXT: usize = 80;
/// The number of characters of an object's kind, namespace and name that a log line shows.
const MAX_SHOWN_OBJECT: usize = 160;

/// A decoded value, and the parts of the messages that were rejected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decoded<T> {
    pub value: T,
    pub rejected: Vec<Rejected>,
}

/// Applies the changes of the objects of one kind, and of what is rejected of them.
pub(crate) fn apply_kind<M, T>(
    changes: &BTreeMap<Arc<str>, Option<Arc<M>>>,
    kind: &str,
    rejections: &mut Rejections,
    decode: impl Fn(&Arc<str>, &M) -> Decoded<Option<T>>,
    mut change: impl FnMut(&Arc<str>, Option<T>),
) {
    for (name, message) in changes {
        let decoded = message.as_ref().map(|it| decode(name, it));
        let Decoded { value, rejected } = decoded.unwrap_or_default();
        rejections.set(&format!("{kind} {name}"), rejected);
        change(name, value);
    }
}

pub(crate) struct Reader(RejectedParts);

impl Reader {
    /// A reader of an object by its kind and name, which may be any text.
    pub(crate) fn new(object: &str) -> Self {
        Self(RejectedParts::of(shorten(object, MAX_SHOWN_OBJECT)))
    }

    pub(crate) fn finish<T>(self, value: T) -> Decoded<T> {
        Decoded { value, rejected: self.0.into_list() }
    }

    pub(crate) fn reject(&mut self, field: &str, reason: impl Into<String>) {
        self.0.push(field, reason, Effect::NotServed);
    }

    pub(crate) fn parse<T: FromStr>(&mut self, field: &str, text: &str) -> Option<T> {
        let parsed = text.parse().ok();
        if parsed.is_none() {
            self.reject(field, format!("\"{}\" is not a valid address or range", shown(text)));
        }
        parsed
    }

    pub(crate) fn port_number(&mut self, field: &str, number: i32) -> Option<NonZeroU16> {
        let port = u16::try_from(number).ok().and_then(NonZeroU16::new);
        if port.is_none() {
            self.reject(field, format!("{number} is not a port; it must be 1 to 65535"));
        }
        port
    }

    pub(crate) fn protocol(&mut self, field: &str, number: i32) -> Option<Protocol> {
        match localv1::Protocol::try_from(number) {
            Ok(localv1::Protocol::Tcp) => Some(Protocol::Tcp),
            Ok(localv1::Protocol::Udp) => Some(Protocol::Udp),
            Ok(localv1::Protocol::Sctp) => Some(Protocol::Sctp),
            Ok(localv1::Protocol::UnknownProtocol) | Err(_) => {
                self.reject(field, format!("unknown protocol {number}; it must be TCP, UDP or SCTP"));
                None
            }
        }
    }

    /// Whether a name has the form; an empty one has.
    pub(crate) fn accepts(&mut self, field: &str, name: &str, form: NameForm) -> bool {
        let is_accepted = name.is_empty() || form.accepts(name);
        if !is_accepted {
            self.reject(field, format!("\"{}\" is not such a name; {}", shown(name), form.remedy()));
        }
        is_accepted
    }

    /// A name; `None` if it is empty, or rejected.
    pub(crate) fn name<'a>(&mut self, field: &str, name: &'a str, form: NameForm) -> Option<&'a str> {
        Some(name).filter(|it| self.accepts(field, it, form) && !it.is_empty())
    }

    /// The addresses of single hosts.
    pub(crate) fn hosts<T>(&mut self, field: &str, texts: &[String], used_as: AddressUse) -> Vec<T>
    where
        T: FromStr + Copy,
        IpAddr: From<T>,
    {
        let addresses = texts.iter().filter_map(|it| {
            let address: T = self.parse(field, it)?;
            self.is_usable(field, IpAddr::from(address), used_as).then_some(address)
        });
        addresses.collect()
    }

    /// Whether an address is that of one host.
    pub(crate) fn is_usable(&mut self, field: &str, address: IpAddr, used_as: AddressUse) -> bool {
        let refusal = address::refusal(address, used_as);
        if let Some(reason) = refusal {
            self.reject(field, format!("{address} {reason}"));
        }
        refusal.is_none()
    }

    /// The addresses of a set, those of IPv4 first.
    pub(crate) fn addresses(
        &mut self,
        field: &str,
        set: Option<&localv1::IpSet>,
        used_as: AddressUse,
    ) -> Vec<IpAddr> {
        let Some(set) = set else { return Vec::new() };
        let v4 = self.hosts(field, &set.v4, used_as).into_iter().map(IpAddr::V4);
        let v6 = self.hosts(field, &set.v6, used_as).into_iter().map(IpAddr::V6);
        v4.chain(v6).collect()
    }

    /// The first address of each family of an endpoint; rejected if there is none.
    pub(crate) fn endpoint_addresses(
        &mut self,
        key: &str,
        set: Option<&localv1::IpSet>,
    ) -> (Option<Ipv4Addr>, Option<Ipv6Addr>) {
        let set = set.cloned().unwrap_or_default();
        let v4 = self.hosts("endpoint", &set.v4, AddressUse::Endpoint).first().copied();
        let v6 = self.hosts("endpoint", &set.v6, AddressUse::Endpoint).first().copied();
        if v4.is_none() && v6.is_none() {
            self.reject("endpoint", format!("{} has no address that can be used", shown(key)));
        }
        (v4, v6)
    }
}

/// The beginning of a text, escaped for a log line.
pub(crate) fn shown(text: &str) -> String {
    shorten(text, MAX_SHOWN_TEXT)
}

fn shorten(text: &str, max: usize) -> String {
    let mut shown: String = text.chars().take(max).flat_map(char::escape_debug).collect();
    if text.chars().nth(max).is_some() {
        shown.push('…');
    }
    shown
}
