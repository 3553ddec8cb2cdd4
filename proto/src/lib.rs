//! The contract between a brain, which computes what each node serves, and the backends that program it: the protobuf
//! messages and a client library.
//!
//! | feature | |
//! |---|---|
//! | `client` (default) | [`client`]: follows a brain across restarts and outages |
//! | `clap` | [`client::Flags`]: the flags of a backend, for its command line |
//! | `backend` | [`backend`]: what every backend needs beside its own datapath |
//! | `tls` | [`tls`]: mutual TLS, with certificates that are reloaded when they change |
//! | `server` | the gRPC traits that a brain implements |
//! | `json` | proto3 JSON of the messages, for serde |
//!
//! The crate is not in a registry yet: depend on the repository, with a fixed commit or tag (`rev = "…"`, `tag = "…"`).
//! It needs Rust 1.93 and a tokio runtime, but no `protoc`:
//!
//! ```toml
//! [dependencies]
//! proxy-contract = { git = "https://github.com/kube-proxy-ebpf/kube-proxy-ebpf", rev = "…" }
//! tokio = { version = "1", features = ["macros", "rt"] }
//! tracing-subscriber = "0.3"
//! ```
//!
//! [`client`] returns no errors but logs them with `tracing`: without a subscriber, a wrong address causes no output.
//!
//! Versions are compatible with each other and with KPNG's: the client requests extensions ([`localv1::Extension`]) and the
//! reset of the server lists those that it sends; see the head of `localv1.proto`.
//!
//! Invariant: the wire format is stable.
//! Field numbers and types never change; a new field has a new number and may be absent.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[cfg_attr(
    any(feature = "client", feature = "server", feature = "json"),
    expect(clippy::allow_attributes_without_reason, unused_qualifications, reason = "generated")
)]
#[cfg_attr(any(feature = "server", feature = "json"), expect(clippy::allow_attributes, reason = "generated"))]
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

#[cfg(feature = "backend")]
pub mod backend;
#[cfg(feature = "client")]
pub mod client;
#[cfg(any(feature = "client", feature = "server"))]
mod codec;
mod diff_store;
pub mod digest;
mod endpoint;
mod ip_set;
mod target;
#[cfg(feature = "tls")]
pub mod tls;

pub use diff_store::DiffStore;
pub use generated::{globalv1, localnetv1, localv1};

pub use target::{Target, TargetError, Targets};

/// The encoded `google.protobuf.FileDescriptorSet` of all packages, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The example of the README is compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod tests;
