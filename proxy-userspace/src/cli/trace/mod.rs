//! `trace`: a line for each decision of the programs, as it is made.
//!
//! The process that serves this node attaches the programs that report, see `server`; this command asks it for the lines.

mod filters;
mod line;
mod names;
mod packet;
mod packets;
mod server;

use std::{
    io::{self, BufRead as _, ErrorKind, IsTerminal as _, Write as _},
    num::NonZeroU64,
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use model::escaped;

pub(super) use self::server::serve;
use self::{filters::Filters, line::Line};
use super::{
    flags::{StatusSocketFlag, go_duration},
    output::{unanswered, wrong_usage},
    reader::{self, PodNames},
};

/// Show each connection to a Service as it is made: who connects, where to, and which endpoint it gets
///
/// The process that serves this node attaches a variant of its programs that reports each decision of connect(2), and of
/// sendto(2) of unconnected sockets, until this command ends; before and after that nothing is reported, and nothing costs
/// time. Also shown are destinations in a network of Services that belong to no Service. Of datagrams the first one to each
/// endpoint is shown. With -v, each is followed by the steps of its decision, with -vv also by those of the end of its socket.
///
/// With --service or --to, and without a filter for processes, the first packet of each connection by nftables is shown, too:
/// its endpoint, or the rule that has dropped it. Where packets from outside are forwarded whole, it is shown which node they go
/// to. One trace runs at a time; it ends with this command, which ends with its output or its input.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kube-proxy-ebpf trace --service default/web
  kube-proxy-ebpf trace --failed --for 30s
  kube-proxy-ebpf trace --pid 4242 --close --output json")]
pub(super) struct Flags {
    #[command(flatten)]
    filters: Filters,
    /// Output format
    #[arg(long, short, default_value = "text")]
    output: Output,
    /// End after this many lines
    #[arg(long, value_name = "NUMBER")]
    count: Option<NonZeroU64>,
    /// End after this time, such as 30s
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration)]
    duration: Option<Duration>,
    #[command(flatten)]
    status: StatusSocketFlag,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// A line of text for each event
    Text,
    /// A line of JSON for each event
    Json,
}

/// A duration of at least a millisecond.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration = go_duration(text).filter(|it| *it >= Duration::from_millis(1));
    duration.ok_or_else(|| "use a duration such as 30s or 5m".to_owned())
}

/// Prints the lines of a trace until it ends; with the steps of decisions from verbosity 1 on.
pub(super) fn main(flags: &Flags, verbosity: u8) -> Result<()> {
    const REMEDY: &str = "give the --status-socket of `run` or `agent`";
    let Some(socket) = flags.status.path() else {
        return Err(wrong_usage(format_args!("--status-socket is disabled: {REMEDY}")));
    };
    let pods = reader::watch()?;
    let filters = Filters { verbosity, ..flags.filters.clone() };
    let lines = match admin::query_trace(socket, &filters.given(socket)?) {
        Ok(Ok(lines)) => lines,
        Ok(Err(refusal)) => bail!("{refusal}"),
        Err(error) => {
            let absent = "and only the process that serves this node can trace";
            bail!(unanswered(socket, &error, absent, REMEDY));
        }
    };
    flags.print(lines, &pods)
}

impl Flags {
    /// Prints lines until the trace ends, or there were enough.
    fn print(&self, mut lines: io::BufReader<UnixStream>, pods: &PodNames) -> Result<()> {
        let end = self.duration.map(|it| Instant::now() + it);
        let mut printed = 0;
        let mut text = String::new();
        loop {
            let rest = end.map(|it| it.saturating_duration_since(Instant::now()));
            if rest.is_some_and(|it| it.is_zero()) {
                return Ok(());
            }
            lines.get_ref().set_read_timeout(rest)?;
            text.clear();
            match lines.read_line(&mut text) {
                Ok(0) => bail!("the process has ended the trace; its log names the reason"),
                Ok(_) => {}
                // The time is over.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
                Err(error) => return Err(error.into()),
            }
            // The process writes an empty line now and then, to notice that this one is gone.
            if text.trim().is_empty() {
                continue;
            }
            let mut line: Line = serde_json::from_str(&text).context("the process has another version")?;
            if line == Line::Started {
                if io::stderr().is_terminal() {
                    eprintln!("tracing, until this command ends; times are in UTC");
                } else {
                    eprintln!("tracing");
                }
                continue;
            }
            line.add_pod(&pods.lock());
            let shown = match self.output {
                Output::Json => serde_json::to_string(&line)? + "\n",
                Output::Text => line.text().map(|it| it + "\n").unwrap_or_default(),
            };
            let mut stdout = io::stdout().lock();
            stdout.write_all(escaped(&shown).as_bytes())?;
            stdout.flush()?;
            printed += u64::from(line.is_traffic());
            if self.count.is_some_and(|it| printed >= it.get()) {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_unit() {
        assert_eq!(parse_duration("1m30s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("100ms"), Ok(Duration::from_millis(100)));
        for text in ["3", "0s", "-5s", "soon", ""] {
            assert!(parse_duration(text).is_err_and(|it| it.contains("such as 30s")), "{text}");
        }
    }
}
