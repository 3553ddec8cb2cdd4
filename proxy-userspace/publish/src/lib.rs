//! Publishes the states of nodes and of the cluster under revisions, to subscribers in the same process.
//!
//! Invariant: the newest state wins.
//! A state gets a new revision only if it differs from the previous one, and a slow subscriber skips intermediate states.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod followers;
pub mod node_registry;
mod node_states;
mod publisher;
mod state_json;
pub mod upstream;

pub use node_registry::NodeRegistry;
pub use node_states::{CountedNodes, NodeStates, SingleNode, SubscribeError, Watchers};
pub use publisher::{Published, Publisher, Subscription};
pub use state_json::{PRINTED_EXTENSIONS, json_parts};

#[cfg(test)]
mod tests;
