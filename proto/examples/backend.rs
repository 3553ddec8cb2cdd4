//! A backend that prints the ports of all Services.

use std::{convert::Infallible, process::ExitCode};

use clap::Parser;
use proxy_contract::{
    backend::{self, Backend, Changed, Flags, NotServed, ports},
    client::State,
};

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    flags: Flags,
}

struct Printer;

impl Backend for Printer {
    type Error = Infallible;

    async fn apply(&mut self, state: &State, _: Changed<'_>) -> Result<Vec<NotServed>, Infallible> {
        for (name, it) in &state.services {
            println!("{name}: {:?}", ports(it));
        }
        Ok(Vec::new())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Arguments { flags } = Arguments::parse();
    backend::main(&flags, &mut Printer).await
}
