//! What the documents, the manifests and the code itself promise; no kernel is needed.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod architecture;
mod deploy;
mod install_commands;
mod observability;
