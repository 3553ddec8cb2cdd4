//! What is published, served and followed over real sockets.

#![expect(clippy::unwrap_used, reason = "what fails in a helper fails the test")]

mod additions;
mod any_node;
mod api_source;
mod client;
mod common;
mod conversation;
mod global;
mod global_laws;
mod global_peer;
mod hardship;
mod laws;
mod next;
mod pki;
mod recorded;
mod sockets;
mod tls;
