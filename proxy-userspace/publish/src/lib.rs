//! Publishes the states of nodes under revisions, in process and over gRPC.
//!
//! Invariant: the newest state wins.
//! A state gets a new revision only if it differs from the previous one, and a slow subscriber skips intermediate states.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod explain;
pub mod followers;
pub mod grpc;
pub mod node_registry;
mod node_states;
pub mod print;
mod publisher;
pub mod upstream;

pub use node_registry::NodeRegistry;
pub use node_states::{CountedNodes, NodeStates, SingleNode, SubscribeError};
pub use publisher::{Published, Publisher, Subscription};

#[cfg(test)]
mod tests;
