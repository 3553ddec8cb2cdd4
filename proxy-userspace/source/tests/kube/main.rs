//! The source `kube` against a real HTTP server, in all that can happen between the two.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod events;
mod lists;
mod outages;
mod refusals;
mod watches;
