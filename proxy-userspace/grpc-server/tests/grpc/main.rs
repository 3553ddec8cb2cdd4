//! The gRPC server and its clients over real sockets.

#![expect(clippy::unwrap_used, reason = "a failed helper fails the test")]

mod acknowledgments;
mod api_source;
mod change_stream;
mod client;
mod cluster_convergence;
mod cluster_resume;
mod cluster_watch;
mod common;
mod conflicts;
mod crowd;
mod explanations;
mod extensions;
mod heartbeats;
mod kpng_recording;
mod listen;
mod long_poll;
mod metadata;
mod misbehaving_clients;
mod node_registry;
mod peer;
mod pki;
mod resume;
#[path = "../../../../proto/tests/common/scripted_brain.rs"]
mod scripted_brain;
mod several_brains;
mod tls;
