//! HTTP servers with bounds, and a client: listeners, connections and bodies.
//!
//! Invariant: nothing here reads the state; what a page says is not known here.

pub(crate) mod bind;
mod bind_address;
pub(crate) mod body;
mod client;
mod page_group;
pub(crate) mod server;

pub(crate) use self::page_group::HttpConnections;
pub use self::{
    bind_address::BindAddress,
    client::{Listener, get, page, query_explanation, query_readiness, query_status, query_trace},
    page_group::PageGroup,
    server::Servers,
};
