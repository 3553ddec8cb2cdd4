//! The contract between a brain and its backends: the messages, and a library for those who want to follow a brain.
//!
//! | feature | |
//! |---|---|
//! | `client` (on by default) | [`client`]: follows a brain, whatever happens to it |
//! | `tls` | [`tls`]: mutual TLS, with certificates that are read again when they change |
//! | `server` | the traits that a brain implements |
//! | `json` | the messages in their proto3 JSON form, by way of serde |
//!
//! It is no package of a registry: a program outside of this repository depends on it by its place, with a commit or a tag
//! (`rev = "…"`, `tag = "…"`) to stay at. It takes Rust 1.95, no `protoc`, and a tokio runtime of the program's own:
//!
//! ```toml
//! [dependencies]
//! proto = { git = "https://github.com/kube-proxy-ebpf/kube-proxy-ebpf", rev = "…" }
//! tokio = { version = "1", features = ["macros", "rt"] }
//! tracing-subscriber = "0.3"
//! ```
//!
//! [`client`] never fails, and says what goes wrong in the log alone, by `tracing`: without a subscriber a wrong address
//! looks like a brain that has nothing to say.
//!
//! How two versions get along, and how both get along with KPNG's: see the head of `localv1.proto`.
//! A client names the additions that it wants ([`localv1::Extension`]), and passes over those that it does not know.
//! The reset of a server names those of them that it says; a server that names none says none.
//!
//! The one rule: what is on the wire stays on the wire.
//! Numbers and types are never changed; what is new has a new number, and may be absent.

#![forbid(unsafe_code)]

#[cfg_attr(
    any(feature = "client", feature = "server", feature = "json"),
    expect(clippy::allow_attributes_without_reason, unused_qualifications, reason = "generated")
)]
#[cfg_attr(any(feature = "server", feature = "json"), expect(clippy::allow_attributes, reason = "generated"))]
#[expect(missing_docs, reason = "generated from the .proto files, which have the words")]
#[cfg_attr(feature = "json", expect(clippy::cloned_instead_of_copied, reason = "generated"))]
mod generated {
    /// The state of one node as a stream of changes; wire-compatible with KPNG.
    pub mod localv1 {
        include!(concat!(env!("OUT_DIR"), "/localv1.rs"));
        #[cfg(feature = "json")]
        include!(concat!(env!("OUT_DIR"), "/localv1.serde.rs"));
    }

    /// The state of the whole cluster as a stream of changes; wire-compatible with KPNG.
    pub mod globalv1 {
        include!(concat!(env!("OUT_DIR"), "/globalv1.rs"));
        #[cfg(feature = "json")]
        include!(concat!(env!("OUT_DIR"), "/globalv1.serde.rs"));
    }

    /// The long poll of KEP-2104.
    pub mod localnetv1 {
        include!(concat!(env!("OUT_DIR"), "/localnetv1.rs"));
        #[cfg(feature = "json")]
        include!(concat!(env!("OUT_DIR"), "/localnetv1.serde.rs"));
    }
}

#[cfg(feature = "client")]
pub mod client;
#[cfg(any(feature = "client", feature = "server"))]
mod codec;
mod diff_store;
mod endpoint;
mod target;
#[cfg(feature = "tls")]
pub mod tls;

pub use diff_store::DiffStore;
pub use generated::{globalv1, localnetv1, localv1};

pub use target::{Target, TargetError};

/// The encoded `google.protobuf.FileDescriptorSet` of all packages, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

#[cfg(test)]
mod tests;
