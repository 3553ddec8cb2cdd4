//! What every backend needs beside its own datapath: flags, a log, pages, signals, and the loop that applies states.
//!
//! A backend implements [`Backend`] and calls [`main`]:
//!
#![doc = concat!("```no_run\n", include_str!("../../examples/backend.rs"), "```")]
//!
//! Invariant: the last state stays active.
//! An outage of the brain, a failed apply and a signal leave the node as it is.

mod flags;
mod health_checks;
mod http;
mod metrics;
mod ports;
mod run;
mod signals;

pub use self::{
    flags::Flags,
    ports::{Family, Frontend, FrontendAddress, ServedPort, ports},
    run::{Backend, Changed, NotServed, RunError, exit_code, main, run},
};
