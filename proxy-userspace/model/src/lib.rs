//! The types of the domain: the state of a cluster ([`cluster`]), and the state that one node must serve ([`state`]).
//!
//! Invariant: plain data only.
//! No I/O, no clock, no wire format, no types of a Kubernetes client or of the kernel.

#![forbid(unsafe_code)]

mod counted;
mod error_chain;
mod escape;
mod frontend_kind;
mod names;
mod nearest;
mod net;
mod rejected;
mod service_metadata;
mod service_name;
mod time;

pub mod address;
pub mod cluster;
pub mod conflicts;
pub mod diff;
pub mod object_map;
pub mod state;

pub use counted::counted;
pub use error_chain::error_chain;
pub use escape::{escaped, escaped_line};
pub use frontend_kind::FrontendKind;
pub use names::NameForm;
pub use nearest::nearest;
pub use net::{Family, PerFamily, Protocol};
pub use rejected::{Effect, Rejected, RejectedObject, RejectedParts, Rejections};
pub use service_metadata::{NamePattern, RequestedMetadata, ServiceMetadata};
pub use service_name::ServiceName;
pub use time::Timestamp;
