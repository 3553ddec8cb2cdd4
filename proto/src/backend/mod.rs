//! What every backend needs beside its own datapath: flags, a log, pages, signals, and the loop that applies states.
//!
//! A backend implements [`Backend`] and calls [`main`]:
//!
//! ```no_run
//! use std::{convert::Infallible, process::ExitCode};
//!
//! use clap::Parser;
//! use proxy_contract::{
//!     backend::{self, Backend, Changed, Flags, NotServed, ports},
//!     client::State,
//! };
//!
//! #[derive(Parser)]
//! struct Arguments {
//!     #[command(flatten)]
//!     flags: Flags,
//! }
//!
//! struct Printer;
//!
//! impl Backend for Printer {
//!     type Error = Infallible;
//!
//!     async fn apply(&mut self, state: &State, _: Changed<'_>) -> Result<Vec<NotServed>, Infallible> {
//!         for (name, it) in &state.services {
//!             println!("{name}: {:?}", ports(it));
//!         }
//!         Ok(Vec::new())
//!     }
//! }
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> ExitCode {
//!     let Arguments { flags } = Arguments::parse();
//!     backend::main(&flags, &mut Printer).await
//! }
//! ```
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
