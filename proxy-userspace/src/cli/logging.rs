//! The log, on standard error; standard output is left to the commands' results.
//! Invariant: one event is one line, and nothing that someone else has written in it acts on a terminal.

use std::{
    collections::VecDeque,
    io::{self, IsTerminal as _, Write, stderr},
    sync::{Mutex, MutexGuard, PoisonError},
};

use clap::{ArgAction, Args, ValueEnum};
use model::escaped_line;
use tracing::Level;
use tracing_subscriber::{
    field::RecordFields,
    fmt::{FormatFields, MakeWriter, format},
};

#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(super) struct LogFlags {
    /// Format of the log
    #[arg(long, default_value = "text", global = true)]
    log_format: LogFormat,
    /// Log at level debug; given twice: trace
    #[arg(short, long = "verbose", action = ArgAction::Count, global = true)]
    verbose: u8,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// Human-readable lines
    Text,
    /// One JSON object per line
    Json,
}

impl LogFlags {
    /// Whether more than usual is to be shown.
    pub(super) fn is_verbose(&self) -> bool {
        self.verbose > 0
    }

    /// Installs the logger.
    pub(super) fn init(&self) {
        let level = match self.verbose {
            0 => Level::INFO,
            1 => Level::DEBUG,
            _ => Level::TRACE,
        };
        match self.log_format {
            LogFormat::Text => tracing::subscriber::set_global_default(text(
                level,
                stderr().is_terminal(),
                || Kept(stderr()),
            )),
            LogFormat::Json => tracing::subscriber::set_global_default(json(level, || Kept(stderr()))),
        }
        .expect("it is set once");
    }
}

/// How much of the log is kept, in bytes.
const MAX_KEPT: usize = 256 << 10;

/// The newest lines, at most [`MAX_KEPT`].
static NEWEST: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// The newest lines of this process' log, for a page.
pub(super) fn newest_lines() -> String {
    newest().iter().map(String::as_str).collect()
}

fn newest() -> MutexGuard<'static, VecDeque<String>> {
    NEWEST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes events, and keeps the newest ones. Each event is one write.
#[derive(Debug)]
struct Kept<W>(W);

impl<W: Write> Write for Kept<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut lines = newest();
        lines.push_back(without_colours(&String::from_utf8_lossy(line)));
        let mut kept: usize = lines.iter().map(String::len).sum();
        while kept > MAX_KEPT {
            kept -= lines.pop_front().map_or(kept, |it| it.len());
        }
        drop(lines);
        self.0.write_all(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Without the escape sequences of colours (`ESC [ … m`).
fn without_colours(line: &str) -> String {
    let mut parts = line.split("\x1b[");
    let first = parts.next().unwrap_or_default();
    let rest = parts.map(|it| it.split_once('m').map_or(it, |(_, text)| text));
    [first].into_iter().chain(rest).collect()
}

fn text<W>(level: Level, colours: bool, writer: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let log = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_ansi(colours);
    log.fmt_fields(EscapedFields).with_writer(writer).finish()
}

fn json<W>(level: Level, writer: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let log = tracing_subscriber::fmt().with_max_level(level).with_target(false).json().flatten_event(true);
    log.with_writer(EscapedLines(writer)).finish()
}

/// The fields of an event as text; the colours are around them.
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

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for EscapedLines<W> {
    type Writer = EscapedLines<W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        EscapedLines(self.0.make_writer())
    }
}

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
    use std::sync::{Arc, Mutex};

    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);

    impl Write for Memory {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is logged about a name that someone else has chosen, as text and as JSON.
    fn logged(name: &str) -> [String; 2] {
        let (plain, structured) = (Memory::default(), Memory::default());
        let writer = |it: &Memory| {
            let it = it.clone();
            move || it.clone()
        };
        let event = || tracing::warn!(error = name, debug = ?name, "Service {name} is rejected");
        tracing::subscriber::with_default(text(Level::INFO, false, writer(&plain)), event);
        tracing::subscriber::with_default(json(Level::INFO, writer(&structured)), event);
        [plain, structured].map(|it| String::from_utf8(it.0.lock().unwrap().clone()).unwrap())
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
