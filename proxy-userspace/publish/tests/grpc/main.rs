//! What is published, served and followed over real sockets.

#![expect(clippy::unwrap_used, reason = "what fails in a helper fails the test")]

mod any_node;
mod client;
mod common;
mod conversation;
mod hardship;
mod laws;
mod next;
mod pki;
mod recorded;
mod sockets;
mod tls;
