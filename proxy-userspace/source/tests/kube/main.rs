//! The source `kube` against a real HTTP server, with every failure that can happen between them.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod credential_plugin;
mod errors;
mod event_recorder;
mod lists;
mod optional_resources;
mod outages;
mod proxies;
mod source_test;
mod watches;
