//! Netlink attributes, for messages that no library has types for.
//!
//! The library does lengths and padding; here is only the content.

use netlink_packet_core::{Emitable as _, NLA_F_NESTED, Nla, NlasIterator};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    pub kind: u16,
    /// In the byte order that the kernel expects.
    pub value: Vec<u8>,
}

impl Attribute {
    pub fn bytes(kind: u16, value: impl Into<Vec<u8>>) -> Self {
        Self { kind, value: value.into() }
    }

    /// A string, which the kernel expects to end with a zero byte.
    pub fn text(kind: u16, value: &str) -> Self {
        Self::bytes(kind, [value.as_bytes(), &[0]].concat())
    }

    /// 32 bits in network byte order.
    pub fn u32(kind: u16, value: u32) -> Self {
        Self::bytes(kind, value.to_be_bytes())
    }

    /// 64 bits in network byte order.
    pub fn u64(kind: u16, value: u64) -> Self {
        Self::bytes(kind, value.to_be_bytes())
    }

    pub fn u8(kind: u16, value: u8) -> Self {
        Self::bytes(kind, [value])
    }

    pub fn nested(kind: u16, attributes: impl IntoIterator<Item = Self>) -> Self {
        let mut encoded = Vec::new();
        attributes.into_iter().for_each(|it| it.append(&mut encoded));
        Self::encoded(kind, encoded)
    }

    /// Other attributes, as [`Self::append`] has encoded them.
    pub fn encoded(kind: u16, attributes: Vec<u8>) -> Self {
        Self { kind: kind | NLA_F_NESTED, value: attributes }
    }

    /// Appends it as it is in a message, with header and padding.
    pub fn append(&self, buffer: &mut Vec<u8>) {
        let begin = buffer.len();
        buffer.resize(begin + self.buffer_len(), 0);
        self.emit(&mut buffer[begin..]);
    }

    /// Its length in a message, with header and padding.
    pub fn length(&self) -> usize {
        self.buffer_len()
    }
}

impl Nla for Attribute {
    fn value_len(&self) -> usize {
        self.value.len()
    }

    fn kind(&self) -> u16 {
        self.kind
    }

    fn emit_value(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.value);
    }
}

/// The attributes of a message from the kernel: type and value. It ends at the first malformed one.
pub fn each(buffer: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(buffer).map_while(Result::ok).map(|it| {
        let length = usize::from(it.length());
        (it.kind(), &it.into_inner()[4..length])
    })
}

pub fn find(buffer: &[u8], kind: u16) -> Option<&[u8]> {
    each(buffer).find_map(|(it, value)| (it == kind).then_some(value))
}

pub fn text(value: &[u8]) -> String {
    let end = value.iter().position(|it| *it == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

/// 32 bits in network byte order from the kernel.
pub fn u32(value: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(value.try_into().ok()?))
}
