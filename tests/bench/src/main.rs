//! `cargo xtask bench`: latency, CPU and memory, as figures next to their goals.
//! Invariants: each case is measured in a process of its own; a subject that fails keeps no other one out of a report.

mod apply;
mod backends;
mod connect;
mod example;
mod figures;
mod file;
mod fleet;
mod kernel_figures;
mod nft;
mod objects;
mod outside;
mod outside_cluster;
mod outside_packets;
mod outside_program;
mod page;
mod plot;
mod proxies;
mod proxy_command;
mod proxy_figures;
mod record;
mod scale;

use std::{fs, process::ExitCode};

use anyhow::{Context as _, Result, bail};
use build_tools::command::{exit_code, status, workspace};
use clap::{Args, CommandFactory as _, Parser, Subcommand, builder::PossibleValuesParser};

use crate::{
    figures::Figures,
    page::{PICTURE_PREFIX, Page},
    proxies::ProxiesArguments,
    record::{Origin, Record, Records},
};

/// Measure latency, CPU and memory, and print the figures next to their goals.
#[derive(Parser)]
#[command(bin_name = "cargo xtask bench", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    #[command(flatten)]
    Measure(Subject),
    /// Record the figures of all subjects in docs/figures, and write docs/performance.md with plots of them (as root)
    Report(ReportArguments),
}

#[derive(Clone, Debug, Subcommand)]
enum Subject {
    /// From a received state until every program uses it; a start; and the memory for both (as root)
    Apply,
    /// The backends on the contract that this machine can run: time and CPU of a change, start, memory (as root)
    Backends(backends::BackendsArguments),
    /// A connect through a Service's address compared with one to an endpoint, and run times of the programs (as root)
    Connect,
    /// A folder of many manifests, and one large file: time to read, CPU at rest and of a change, memory (as root)
    File,
    /// A brain that 5,000 nodes follow: time until all have a change, CPU, memory and bytes, also of its restart
    Fleet(fleet::FleetArguments),
    /// The nftables path: loads, changes and restarts at 100 to 30,000 Services (as root)
    Nft,
    /// Packets from outside that are forwarded whole, beside the nftables path: CPU of a packet, connections, the program, rows (as
    /// root)
    Outside,
    /// This proxy beside kube-proxy and KPNG, if their binaries are given: time and CPU of a change, start, memory, connects, at
    /// 100 to 50,000 Services (as root)
    Proxies(ProxiesArguments),
    /// A change while 50 pods per second are replaced, in clusters of up to a million endpoints: time until a connect sees it, CPU
    /// and memory (as root)
    Scale(scale::ScaleArguments),
}

/// What `bench report` measures and draws.
#[derive(Clone, Debug, Args)]
struct ReportArguments {
    /// Measure this subject instead of all; can be repeated
    #[arg(long, value_name = "SUBJECT", value_parser = PossibleValuesParser::new(subjects()), conflicts_with = "from_records")]
    only: Vec<String>,
    /// Measure nothing: write the page again from docs/figures
    #[arg(long)]
    from_records: bool,
    #[command(flatten)]
    proxies: ProxiesArguments,
}

/// The name of a subject alone.
#[derive(Parser)]
struct Named {
    #[command(subcommand)]
    subject: Subject,
}

fn subjects() -> Vec<String> {
    Named::command().get_subcommands().map(|it| it.get_name().to_owned()).collect()
}

fn main() -> ExitCode {
    exit_code(match Arguments::parse().task {
        Task::Report(it) => report(it),
        Task::Measure(subject) => subject.measure().and_then(|it| {
            it.print();
            it.check()
        }),
    })
}

impl Subject {
    fn measure(self) -> Result<Figures> {
        match self {
            Self::Apply => apply::bench(),
            Self::Backends(it) => backends::bench(&it),
            Self::Connect => connect::bench(),
            Self::File => file::bench(),
            Self::Fleet(it) => fleet::bench(it),
            Self::Nft => nft::bench(),
            Self::Outside => outside::bench(),
            Self::Proxies(it) => proxies::bench(&it),
            Self::Scale(it) => scale::bench(&it),
        }
    }
}

/// Measures, records the figures, and writes docs/performance.md and its plots from all records.
fn report(ReportArguments { only, from_records, proxies }: ReportArguments) -> Result<()> {
    let mut failed = Vec::new();
    let is_chosen = |name: &String| !from_records && (only.is_empty() || only.contains(name));
    for subject in subjects().into_iter().filter(is_chosen) {
        if let Err(error) = measure_and_record(&subject, &proxies) {
            status("Failed", &format!("{subject}: {error:#}"));
            failed.push(subject);
        }
    }
    write_page()?;
    if !failed.is_empty() {
        bail!("not measured: {}; the page shows their last records", failed.join(", "));
    }
    Ok(())
}

fn measure_and_record(name: &str, proxies: &ProxiesArguments) -> Result<()> {
    let mut origin = Origin::here()?;
    if let Some(disturbance) = origin.disturbance() {
        status("Warning", &format!("{name} is measured {disturbance}"));
    }
    let subject = match name {
        "proxies" => Subject::Proxies(proxies.clone()),
        other => Named::try_parse_from(["bench", other])?.subject,
    };
    let figures = subject.measure()?;
    figures.print();
    origin.versions.clone_from(&figures.versions);
    let path = Record::new(name, origin, figures).write(&record::folder())?;
    status("Recorded", &path.display().to_string());
    Ok(())
}

fn write_page() -> Result<()> {
    let docs = workspace().join("docs");
    let page = Page::new(&Records::read(&record::folder())?)?;
    let path = docs.join("performance.md");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    fs::write(&path, page.fill(&text)?)?;
    let pictures = docs.join("pictures");
    for entry in fs::read_dir(&pictures)? {
        let file = entry?;
        let name = file.file_name().to_string_lossy().into_owned();
        if name.starts_with(PICTURE_PREFIX) && !page.pictures.contains_key(&name) {
            fs::remove_file(file.path())?;
        }
    }
    for (name, svg) in &page.pictures {
        fs::write(pictures.join(name), svg)?;
    }
    status("Ready", &path.display().to_string());
    Ok(())
}
