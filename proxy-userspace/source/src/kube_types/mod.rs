//! Converts Kubernetes' objects to the model's.
//!
//! Invariant: conversion never fails because of a part of an object. A part that is invalid is rejected with a reason, and
//! the rest of the object is used.

mod conversion;
mod endpoint_slice;
mod kind;
mod load_balancing;
mod metadata;
mod node;
pub mod objects;
mod pod;
mod service;
mod service_cidr;
mod validation;

pub use conversion::Converted;
pub use endpoint_slice::endpoint_slice;
pub(crate) use kind::Kind;
pub use node::node;
pub use service::service;
pub use service_cidr::service_cidr;

/// Limit of an EndpointSlice in Kubernetes; a Service with more ports cannot have endpoints for all of them in one.
const MAX_PORTS: usize = 20_000;

#[cfg(test)]
mod tests;
