//! The log, on standard error; standard output is left to the commands' results.
//! Invariant: one event is one line, and nothing that someone else has written in it acts on a terminal. A process that serves
//! never waits for the reader of its log.

use std::{
    collections::VecDeque,
    io::{self, IsTerminal as _, Write, stderr},
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use clap::{ArgAction, Args, ValueEnum};
use model::escaped_line;
use tracing::{Dispatch, dispatcher};
use tracing_subscriber::{
    EnvFilter,
    field::RecordFields,
    fmt::{FormatFields, format},
};

use super::log_queue::LogQueue;

#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(super) struct LogFlags {
    /// Format of the log
    #[arg(long, default_value = "text", global = true)]
    log_format: LogFormat,
    /// Log at level debug; given twice: trace, with the events of libraries
    ///
    /// The signal SIGUSR1 changes the level of a process that runs: from info to debug, to trace, and to info again.
    #[arg(short, long = "verbose", action = ArgAction::Count, global = true)]
    verbose: u8,
    /// kube-proxy's level of the log: 4 means debug, 6 trace
    #[arg(long = "v", value_name = "LEVEL", global = true)]
    klog_level: Option<u64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// Human-readable lines
    Text,
    /// One JSON object per line
    Json,
}

impl LogFlags {
    /// 1 at level debug, 2 and more at level trace.
    pub(super) fn verbosity(&self) -> u8 {
        self.klog_level.map_or(0, kube_proxy_config::verbosity).max(self.verbose)
    }

    pub(super) fn init(&self) {
        self.install(to_stderr);
    }

    /// Installs the logger of a process that serves: its lines are queued, and a thread writes them.
    pub(super) fn init_queued(&self) -> io::Result<()> {
        let (direct, _) = self.dispatch(to_stderr);
        let report_lost = move |lost| {
            dispatcher::with_default(&direct, || {
                tracing::warn!(lost, "lines of the log were lost here, since standard error was not read");
            });
        };
        thread::Builder::new().name("log".into()).spawn(move || QUEUE.write_to(stderr(), report_lost))?;
        self.install(to_queue);
        Ok(())
    }

    fn install(&self, sink: Sink) {
        let (dispatch, set_filter) = self.dispatch(sink);
        dispatcher::set_global_default(dispatch).expect("it is set once");
        *LEVEL.lock() = Some(CurrentLevel { verbosity: self.verbosity(), set_filter });
    }

    fn dispatch(&self, sink: Sink) -> (Dispatch, SetFilter) {
        let filter = filter(self.verbosity());
        match self.log_format {
            LogFormat::Text => text(filter, stderr().is_terminal(), move || Kept(sink)),
            LogFormat::Json => json(filter, move || Kept(sink)),
        }
    }
}

/// Libraries whose events below level info are about each frame and packet.
const LIBRARIES: [&str; 7] = ["h2", "hyper", "hyper_util", "kube_client", "rustls", "tonic", "tower"];

/// What is logged at 0 (level info), 1 (debug, without libraries) and from 2 on (trace, with everything).
fn filter(verbosity: u8) -> EnvFilter {
    match verbosity {
        0 => EnvFilter::new("info"),
        1 => EnvFilter::new(LIBRARIES.map(|it| format!("{it}=info,")).concat() + "debug"),
        _ => EnvFilter::new("trace"),
    }
}

type SetFilter = Box<dyn Fn(EnvFilter) + Send>;

struct CurrentLevel {
    verbosity: u8,
    set_filter: SetFilter,
}

static LEVEL: Mutex<Option<CurrentLevel>> = Mutex::new(None);

/// Changes the level from info to debug, from debug to trace, and from trace to info.
pub(super) fn next_level() {
    let verbosity = LEVEL.lock().as_mut().map(|it| {
        it.verbosity = if it.verbosity < 2 { it.verbosity + 1 } else { 0 };
        (it.set_filter)(filter(it.verbosity));
        it.verbosity
    });
    let name = ["info", "debug", "trace"].get(usize::from(verbosity.unwrap_or_default()));
    tracing::info!(level = name, "the level of the log was changed");
}

/// How long a process that ends waits for the reader of its log.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// The lines of a process that serves.
static QUEUE: LogQueue = LogQueue::new();

/// Waits until the log is written, unless nothing reads it.
pub(super) fn flush() {
    QUEUE.flush(FLUSH_TIMEOUT);
}

type Sink = fn(&[u8]) -> io::Result<()>;

fn to_stderr(line: &[u8]) -> io::Result<()> {
    stderr().write_all(line)
}

fn to_queue(line: &[u8]) -> io::Result<()> {
    QUEUE.push(line);
    Ok(())
}

/// How much of the log is kept, in bytes.
const MAX_KEPT: usize = 256 << 10;

/// The newest lines, at most [`MAX_KEPT`].
static NEWEST: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// The newest lines of this process's log, for a page.
pub(super) fn newest_lines() -> String {
    NEWEST.lock().iter().map(String::as_str).collect()
}

/// Writes events, and keeps the newest ones. Each event is one write.
#[derive(Debug)]
struct Kept(Sink);

impl Write for Kept {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut lines = NEWEST.lock();
        lines.push_back(without_colors(&String::from_utf8_lossy(line)));
        let mut kept: usize = lines.iter().map(String::len).sum();
        while kept > MAX_KEPT {
            kept -= lines.pop_front().map_or(kept, |it| it.len());
        }
        drop(lines);
        (self.0)(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Without the escape sequences of colors (`ESC [ … m`).
fn without_colors(line: &str) -> String {
    let mut parts = line.split("\x1b[");
    let first = parts.next().unwrap_or_default();
    let rest = parts.map(|it| it.split_once('m').map_or(it, |(_, text)| text));
    [first].into_iter().chain(rest).collect()
}

fn text<W: Write + 'static>(
    filter: EnvFilter,
    colors: bool,
    writer: impl Fn() -> W + Send + Sync + 'static,
) -> (Dispatch, SetFilter) {
    let log = tracing_subscriber::fmt().with_target(false).with_ansi(colors).fmt_fields(EscapedFields);
    let log = log.with_writer(writer).with_env_filter(filter).with_filter_reloading();
    let handle = log.reload_handle();
    (log.into(), Box::new(move |filter| drop(handle.reload(filter))))
}

fn json<W: Write + 'static>(
    filter: EnvFilter,
    writer: impl Fn() -> W + Send + Sync + 'static,
) -> (Dispatch, SetFilter) {
    let log = tracing_subscriber::fmt().with_target(false).json().flatten_event(true);
    let writer = move || EscapedLines(writer());
    let log = log.with_writer(writer).with_env_filter(filter).with_filter_reloading();
    let handle = log.reload_handle();
    (log.into(), Box::new(move |filter| drop(handle.reload(filter))))
}

/// The fields of an event as text; the colors are around them.
#[derive(Debug)]
struct EscapedFields;

impl<'writer> FormatFields<'writer> for EscapedFields {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: format::Writer<'writer>,
        fields: R,
    ) -> std::fmt::Result {
        let mut text = String::new();
        format::DefaultFields::new().format_fields(format::Writer::new(&mut text), fields)?;
        writer.write_str(&escaped_line(&text))
    }
}

/// Each event is one write of one line. JSON escapes line feeds itself, but not all that acts on a terminal.
#[derive(Debug)]
struct EscapedLines<W>(W);

impl<W: Write> Write for EscapedLines<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        self.0.write_all(model::escaped(&text).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeWriter, Read as _};

    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::cli::tests::parse_flags;

    /// What a log writes that is given its output.
    fn written(log: impl FnOnce(PipeWriter)) -> String {
        // A few lines fit into a pipe.
        let (mut reader, output) = io::pipe().unwrap();
        log(output);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        text
    }

    /// What is logged about a name that someone else has chosen, as text and as JSON.
    fn logged(name: &str) -> [String; 2] {
        let event = || tracing::warn!(error = name, debug = ?name, "Service {name} is rejected");
        let plain = written(|output| {
            let (dispatch, _) = text(filter(0), false, move || output.try_clone().unwrap());
            dispatcher::with_default(&dispatch, event);
        });
        let structured = written(|output| {
            let (dispatch, _) = json(filter(0), move || output.try_clone().unwrap());
            dispatcher::with_default(&dispatch, event);
        });
        [plain, structured]
    }

    fn check(name: &str) -> [String; 2] {
        let lines = logged(name);
        for it in &lines {
            let line = it.strip_suffix('\n').unwrap();
            assert_eq!(escaped_line(line), line, "{name:?}");
        }
        let event: Value = serde_json::from_str(&lines[1]).unwrap();
        assert_eq!(event["message"], format!("Service {name} is rejected"));
        lines
    }

    #[test]
    fn the_more_detailed_of_both_levels_counts() {
        let verbosity = |words: &[&str]| parse_flags::<LogFlags>(words).unwrap().verbosity();
        let of_kube_proxy = |level| verbosity(&[format!("--v={level}").as_str()]);
        assert_eq!([0, 2, 4, 5, 6, 10].map(of_kube_proxy), [0, 0, 1, 1, 2, 2]);
        assert_eq!(verbosity(&["-v"]), 1);
        assert_eq!(verbosity(&["-v", "--v", "6"]), 2);
        assert_eq!(verbosity(&["-vv", "--v=4"]), 2);
    }

    #[test]
    fn libraries_are_logged_from_level_trace_on() {
        let has = |verbosity| {
            let lines = written(|output| {
                let (dispatch, set_filter) = text(filter(0), false, move || output.try_clone().unwrap());
                dispatcher::with_default(&dispatch, || {
                    set_filter(filter(verbosity));
                    tracing::debug!("own");
                    tracing::debug!(target: "h2::codec", "of a library");
                    tracing::trace!("detail");
                });
            });
            ["own", "of a library", "detail"].map(|it| lines.contains(it))
        };
        assert_eq!([0, 1, 2].map(has), [[false; 3], [true, false, false], [true; 3]]);
    }

    #[test]
    fn a_log_line_is_readable() {
        let [text, _] = check("web – „ä“");
        assert!(
            text.ends_with("WARN Service web – „ä“ is rejected error=\"web – „ä“\" debug=\"web – „ä“\"\n"),
            "{text}"
        );
        let [text, _] = check("a\n2026-01-01T00:00:00Z ERROR forged\u{1b}[2J\u{202e}");
        assert!(
            text.contains("WARN Service a\\n2026-01-01T00:00:00Z ERROR forged\\x1b[2J\\u202e is"),
            "{text}"
        );
    }

    proptest! {
        #[test]
        fn nothing_in_a_log_acts_on_a_terminal(name in any::<String>()) {
            check(&name);
        }
    }
}
