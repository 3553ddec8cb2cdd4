//! What is published, served and followed over real sockets.

#![expect(clippy::unwrap_used, reason = "what fails in a helper fails the test")]

mod api_source;
mod client;
mod common;
mod convergence;
mod extensions;
mod global;
mod global_laws;
mod global_peer;
mod kpng_recording;
mod misbehaving_clients;
mod next;
mod node_registry;
mod pki;
mod sockets;
mod tls;
mod watch_session;
