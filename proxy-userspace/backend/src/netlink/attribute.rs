//! Netlink attributes as a tree, for messages whose types no library knows.
//!
//! The one rule: lengths, padding and nesting are the library's; here is only what is said.

use netlink_packet_core::{Emitable as _, NLA_F_NESTED, Nla, NlasIterator};

/// An attribute to be sent: its type, and what it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Attribute {
    /// Bytes, as the kernel takes them.
    Value(u16, Vec<u8>),
    /// Other attributes.
    Nested(u16, Vec<Attribute>),
}

impl Attribute {
    /// Bytes.
    pub(crate) fn bytes(kind: u16, value: impl Into<Vec<u8>>) -> Self {
        Self::Value(kind, value.into())
    }

    /// A text, which the kernel wants to end with a zero byte.
    pub(crate) fn text(kind: u16, value: &str) -> Self {
        Self::Value(kind, [value.as_bytes(), &[0]].concat())
    }

    /// A number in network byte order.
    pub(crate) fn u32(kind: u16, value: u32) -> Self {
        Self::Value(kind, value.to_be_bytes().to_vec())
    }

    /// A large number in network byte order.
    pub(crate) fn u64(kind: u16, value: u64) -> Self {
        Self::Value(kind, value.to_be_bytes().to_vec())
    }

    /// A small number.
    pub(crate) fn u8(kind: u16, value: u8) -> Self {
        Self::Value(kind, vec![value])
    }

    /// Other attributes.
    pub(crate) fn nested(kind: u16, value: impl Into<Vec<Self>>) -> Self {
        Self::Nested(kind, value.into())
    }

    /// Its length in a message, with header and padding.
    pub(crate) fn length(&self) -> usize {
        self.buffer_len()
    }
}

impl Nla for Attribute {
    fn value_len(&self) -> usize {
        match self {
            Self::Value(_, value) => value.len(),
            Self::Nested(_, attributes) => attributes.as_slice().buffer_len(),
        }
    }

    fn kind(&self) -> u16 {
        match self {
            Self::Value(kind, _) => *kind,
            Self::Nested(kind, _) => kind | NLA_F_NESTED,
        }
    }

    fn emit_value(&self, buffer: &mut [u8]) {
        match self {
            Self::Value(_, value) => buffer.copy_from_slice(value),
            Self::Nested(_, attributes) => attributes.as_slice().emit(buffer),
        }
    }
}

/// Goes through attributes that the kernel sent: type and value. It ends where they stop making sense.
pub(crate) fn each(buffer: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(buffer).map_while(Result::ok).map(|it| {
        let length = usize::from(it.length());
        (it.kind(), &it.into_inner()[4..length])
    })
}

/// The value of the attribute of one type.
pub(crate) fn find(buffer: &[u8], kind: u16) -> Option<&[u8]> {
    each(buffer).find_map(|(it, value)| (it == kind).then_some(value))
}

/// A text that the kernel sent.
pub(crate) fn text(value: &[u8]) -> String {
    let end = value.iter().position(|it| *it == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

/// A number in network byte order that the kernel sent.
pub(crate) fn u32(value: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(value.try_into().ok()?))
}
