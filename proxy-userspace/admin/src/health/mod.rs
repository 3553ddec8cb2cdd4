//! The health of the node: its rules, and the node ports at which load balancers query it.
//!
//! Invariant: health is judged from the state alone; the node ports know of HTTP only how to listen.

mod node_ports;
mod rules;

pub(crate) use self::rules::{Health, NO_STATE, readiness, readyz, timestamp};
pub use self::{
    node_ports::{BindFailure, HealthChecks},
    rules::STALE_AFTER,
};
