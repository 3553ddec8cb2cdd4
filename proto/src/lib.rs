//! The contract between a brain and its backends: the messages, and their proto3 JSON form.
//!
//! The one rule: what is on the wire stays on the wire.
//! Numbers and types are never changed; what is new has a new number, and may be absent.

#![forbid(unsafe_code)]

#[expect(
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    missing_docs,
    unused_qualifications,
    reason = "generated from the .proto files, which have the words"
)]
mod generated {
    /// The state of one node as a stream of changes; wire-compatible with KPNG.
    pub mod localv1 {
        include!(concat!(env!("OUT_DIR"), "/localv1.rs"));
        include!(concat!(env!("OUT_DIR"), "/localv1.serde.rs"));
    }

    /// The state of the whole cluster as a stream of changes; wire-compatible with KPNG.
    pub mod globalv1 {
        include!(concat!(env!("OUT_DIR"), "/globalv1.rs"));
        include!(concat!(env!("OUT_DIR"), "/globalv1.serde.rs"));
    }

    /// The long poll of KEP-2104.
    pub mod localnetv1 {
        include!(concat!(env!("OUT_DIR"), "/localnetv1.rs"));
        include!(concat!(env!("OUT_DIR"), "/localnetv1.serde.rs"));
    }
}

pub use generated::{globalv1, localnetv1, localv1};

/// The encoded `google.protobuf.FileDescriptorSet` of all packages, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

#[cfg(test)]
mod tests;
