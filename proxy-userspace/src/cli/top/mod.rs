//! `top`: which Services are used now.
//!
//! Invariant: what is counted has been read from the kernel. The running process only adds names and ejected endpoints.

mod board;
mod draw;
mod sample;

use std::{
    io::{self, IsTerminal as _},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Error, Result, anyhow, bail};
use clap::Args;
use datapath_ebpf as ebpf;
use datapath_nft as nft;
use ratatui::{
    crossterm::event::{self, Event},
    widgets::TableState,
};

use self::{
    board::{Board, SortBy},
    sample::Reader,
};
use super::{
    config,
    flags::{PinFlags, ReportFlags},
    output::{self, Output},
};

/// Show which Services are used now, and how often they fail
///
/// Reads the counters of the eBPF maps every second; the running process adds the names of Services and the endpoints that are
/// ejected, and need not run. What nftables translates is not shown. Where packets from outside are forwarded whole, the last
/// column has how many of them this node sends on, receives or serves. Keys: arrows select a Service, Enter shows its
/// endpoints, Esc goes back, c r d e n sort, / filters, q quits.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    _config: config::ConfigFlag,
    #[command(flatten)]
    pins: PinFlags,
    #[command(flatten)]
    reports: ReportFlags,
    /// Sort order
    #[arg(long, value_name = "COLUMN", default_value = "connections")]
    sort: SortBy,
    /// Show only Services whose name, port or address contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Print the table once, with the rates of one second
    #[arg(long)]
    once: bool,
    /// Print so many service ports [default: 20, as JSON all]
    #[arg(long, value_name = "NUMBER", requires = "once")]
    limit: Option<usize>,
    /// Output format of --once
    #[arg(long, short, default_value = "text")]
    output: Output,
}

/// How many service ports the table has, unless a flag says otherwise.
const MAX_LINES: usize = 20;

/// Between two readings.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn main(flags: Flags) -> Result<()> {
    let mut reader = Reader::new(flags.pins.pin_dir, flags.reports);
    let mut board = Board::new(flags.sort, flags.filter);
    board.update(reader.read().map_err(uncounted)?);
    if flags.once {
        thread::sleep(INTERVAL);
        board.update(reader.read()?);
        return Ok(output::print(&match flags.output {
            Output::Text => draw::lines(&board, flags.limit.unwrap_or(MAX_LINES)),
            Output::Json => format!("{}\n", draw::json(&board, flags.limit.unwrap_or(usize::MAX))),
        })?);
    }
    if !io::stdout().is_terminal() {
        bail!("the output is no terminal; use --once to print the table");
    }
    let mut terminal = ratatui::try_init()?;
    let result = interact(&mut terminal, &mut board, &mut reader);
    ratatui::try_restore()?;
    result
}

/// Why there are no counters, and what to use instead.
fn uncounted(error: Error) -> Error {
    let has_tables = || nft::frontend_addresses().is_ok_and(|it| !it.is_empty());
    match error.downcast_ref() {
        Some(ebpf::Error::NotInitialized(_)) if has_tables() => anyhow!(
            "nftables alone serves here (--backend nft), and counts connections from outside alone: `status` lists the Services, \
             and `trace --service NAMESPACE/NAME` shows the connections of one"
        ),
        _ => error,
    }
}

fn interact(terminal: &mut ratatui::DefaultTerminal, board: &mut Board, reader: &mut Reader) -> Result<()> {
    let mut shown = TableState::new();
    let mut next = Instant::now() + INTERVAL;
    loop {
        terminal.draw(|frame| draw::draw(frame, board, &mut shown))?;
        if event::poll(next.saturating_duration_since(Instant::now()))?
            && let Event::Key(key) = event::read()?
            && board.press(key).is_break()
        {
            return Ok(());
        }
        let is_due = next <= Instant::now();
        if is_due {
            next = Instant::now() + INTERVAL;
            // A cleanup may have removed the maps; they may return.
            match reader.read() {
                Ok(sample) => board.update(sample),
                Err(error) => board.failure = Some(format!("{error:#}")),
            }
        }
        if let Some(port) = board.opened().map(|it| it.port.id)
            && (is_due || board.endpoints_of(port).is_none())
        {
            match reader.endpoints(port) {
                Ok(endpoints) => board.set_endpoints(endpoints),
                Err(error) => board.failure = Some(format!("{error:#}")),
            }
        }
    }
}
