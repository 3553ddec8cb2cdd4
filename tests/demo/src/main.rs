//! `cargo xtask demo`: the proxy at work, on a cluster of two network namespaces.
//! Invariant: everything shown is measured at real sockets, and the demo fails if a figure is not as expected.

mod cluster;
mod demo;
mod interrupt;
mod manifests;
mod phases;
mod screen;

use std::{io::ErrorKind, net::SocketAddr, process::ExitCode, time::Instant};

use anyhow::{Result, anyhow, bail};
use build_tools::{build, command::exit_code, programs::find_or_install};
use clap::Parser;
use tests::requirements;

use crate::{
    demo::{Demo, Totals},
    screen::{heading, line, number},
};

/// Show the proxy at work: a node in a sandbox, real pods, real connections; no cluster needed (as root, about 15 s).
///
/// Builds what is missing. Fails if a connect fails or a wrong endpoint answers.
#[derive(Parser)]
#[command(bin_name = "cargo xtask demo", max_term_width = 100)]
struct Arguments {
    /// Serve the page of `run --ui` at this address; the demo then goes on until Ctrl-C
    #[arg(
        long,
        value_name = "ADDRESS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "127.0.0.1:10247"
    )]
    ui: Option<SocketAddr>,
    /// Run as a pod of this name
    #[arg(long, hide = true)]
    pod: Option<String>,
    /// The addresses of the pod
    #[arg(hide = true, requires = "pod")]
    addresses: Vec<SocketAddr>,
}

fn main() -> ExitCode {
    let Arguments { ui, pod, addresses } = Arguments::parse();
    let result = match pod {
        Some(name) => cluster::serve(&name, &addresses),
        None => run(ui),
    };
    match result {
        // Marked by `interrupt::mark`.
        Err(error) if error.is::<ErrorKind>() => {
            eprintln!("\ninterrupted; the sandbox is removed");
            ExitCode::from(interrupt::EXIT_CODE)
        }
        other => exit_code(other),
    }
}

fn run(ui: Option<SocketAddr>) -> Result<()> {
    let host = requirements()
        .map_err(|missing| anyhow!("the demo cannot run on this machine:\n  - {}", missing.join("\n  - ")))?;
    find_or_install("ip", "iproute2")?;
    let binary = build::build(false)?;

    interrupt::watch()?;
    let started = Instant::now();
    let mut demo = Demo::new(&host, &binary, ui).map_err(interrupt::mark)?;
    if let Err(error) = show(&mut demo).map_err(interrupt::mark) {
        if let Some(agent) = demo.agent.as_ref().filter(|_| !error.is::<ErrorKind>()) {
            eprintln!("\nThe log of the agent:\n{}", agent.log());
        }
        return Err(error);
    }

    let Totals { connects, failed, wrong } = demo.totals;
    heading("Σ", "Total");
    line(&format!(
        "{} connects, {} failed, {} answered by the wrong endpoint, in {:.1} s.",
        number(connects),
        number(failed),
        number(wrong),
        started.elapsed().as_secs_f64(),
    ));
    if failed + wrong > 0 {
        bail!("{failed} connects failed and {wrong} were answered by the wrong endpoint; both must be 0");
    }
    if let Some(address) = ui {
        phases::until_interrupted(&mut demo, address)?;
    }
    drop(demo);
    line("The sandbox is removed: no process, namespace, cgroup or pin is left.");
    Ok(())
}

fn show(demo: &mut Demo) -> Result<()> {
    let started = Instant::now();
    demo.start_agent()?;
    demo.wait_until_served()?;
    line(&format!("The first connect succeeded {} ms after the start.", started.elapsed().as_millis()));

    // From here on this process is the client.
    let _inside = demo.sandbox.enter()?;
    phases::every_service_answers(demo)?;
    phases::scaling_under_load(demo)?;
    phases::crash_and_restart(demo)?;
    phases::no_endpoints(demo)
}
