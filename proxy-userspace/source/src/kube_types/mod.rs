//! From Kubernetes' own types to facts.
//!
//! The one rule: total.
//! A conversion never fails over a part of an object: what cannot be read is refused alone, with a reason, and the
//! rest of the object stands.

mod endpoint_slice;
mod node;
pub mod objects;
mod service;
mod validation;

use std::sync::Arc;

use k8s_openapi::jiff;
use model::{Timestamp, cluster::Rejected};

pub use endpoint_slice::{endpoint_slice, incomplete};
pub use node::node;
pub use service::service;

use objects::Metadata;

/// An object that has been read, and what of it was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted<T> {
    /// The object; none if it has no usable name, or says nothing about addresses.
    pub object: Option<T>,
    /// The parts that were refused.
    pub rejected: Vec<Rejected>,
}

/// The namespace of an object that names none, as `kubectl` has it.
const DEFAULT_NAMESPACE: &str = "default";

/// How an object is called in messages: `Service default/web`.
fn label_of(kind: &str, meta: &Metadata) -> String {
    let name = validation::short(meta.name.as_deref().unwrap_or(""));
    match meta.namespace.as_deref() {
        _ if kind == "Node" => format!("{kind} {name}"),
        None | Some("") => format!("{kind} {DEFAULT_NAMESPACE}/{name}"),
        Some(namespace) => format!("{kind} {}/{name}", validation::short(namespace)),
    }
}

/// Namespace and name of an object, if both can be part of a path.
fn names_of(meta: &Metadata, refuse: &mut validation::Validator) -> Option<(Arc<str>, Arc<str>)> {
    let name = refuse.name("metadata.name", meta.name.as_deref().unwrap_or(""))?;
    let namespace = match meta.namespace.as_deref() {
        None | Some("") => DEFAULT_NAMESPACE,
        Some(namespace) => namespace,
    };
    Some((refuse.name("metadata.namespace", namespace)?, name))
}

/// A moment, to the microsecond.
fn timestamp(time: jiff::Timestamp) -> Timestamp {
    Timestamp::from_micros(time.as_microsecond())
}

#[cfg(test)]
mod tests;
