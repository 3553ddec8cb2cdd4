//! The lines of log of programs, as aya-log reads them.
//!
//! Invariant: no program waits for a reader. Lines that find no room are counted as lost, and so are those that a reader has no
//! room for.

use std::{
    collections::{HashMap, VecDeque},
    fmt, mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use aya::{
    Ebpf,
    maps::{Array, MapData},
};
use aya_log::EbpfLogger;
use log::{Level, Log, Metadata, Record};
use proxy_common::trace::{LINES_PAUSED, LINES_SAID};

use crate::{error::Error, maps::map_spec};

/// The size of the ring buffer of lines: room for 4,096 of them.
pub(crate) const RING_BYTES: u32 = 1 << 20;
/// After how many lines programs write none until the reader has read the others.
const MAX_LINES: u64 = 1 << 13;
/// How often the lines of the product's programs are logged.
const FORWARD_INTERVAL: Duration = Duration::from_millis(20);
/// Of how many decisions lines are kept.
const MAX_DECISIONS: usize = 1024;

/// What a program does on the way to a decision, or after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceStep {
    pub level: Level,
    /// What was done, such as `frontend: found`.
    pub message: String,
    /// Names and values.
    pub fields: Vec<(String, String)>,
}

#[derive(Debug, PartialEq, Eq)]
struct Line {
    /// The cookie of the socket.
    socket: u64,
    /// When it was said, in nanoseconds of the monotonic clock: the last line of a decision, or of a socket, has that.
    time: Option<u64>,
    step: TraceStep,
}

impl Line {
    /// Parses a line such as `socket=1 frontend: found set=2`; `None` if it has no socket.
    fn parse(level: Level, text: &str) -> Option<Self> {
        let (mut socket, mut time) = (None, None);
        let mut step = TraceStep { level, message: String::new(), fields: Vec::new() };
        for word in text.split(' ') {
            match word.split_once('=') {
                Some(("socket", it)) => socket = it.parse().ok(),
                Some(("time", it)) => time = it.parse().ok(),
                Some((name, it)) => step.fields.push((name.into(), it.into())),
                // Names of a fixed length are filled up with spaces.
                None if word.is_empty() => {}
                None => {
                    let space = if step.message.is_empty() { "" } else { " " };
                    step.message += &format!("{space}{word}");
                }
            }
        }
        Some(Self { socket: socket?, time, step })
    }
}

impl fmt::Display for TraceStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.fields.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

#[derive(Debug)]
struct DecisionSteps {
    socket: u64,
    time: u64,
    steps: Vec<TraceStep>,
}

#[derive(Debug, Default)]
struct Collected {
    /// Lines of incomplete decisions, by socket.
    open: HashMap<u64, Vec<TraceStep>>,
    /// Lines of incomplete decisions without a new line for long, by socket.
    old: HashMap<u64, Vec<TraceStep>>,
    /// Lines of complete decisions, in order.
    decisions: VecDeque<DecisionSteps>,
}

impl Collected {
    fn add(&mut self, Line { socket, time, step }: Line) {
        let before = self.open.remove(&socket).or_else(|| self.old.remove(&socket));
        // The first line of a decision: the one before it was not reported, or its last line was lost.
        let mut steps = before.filter(|_| !step.message.starts_with("prefilter")).unwrap_or_default();
        steps.push(step);
        if let Some(time) = time {
            self.decisions.push_back(DecisionSteps { socket, time, steps });
            return;
        }
        if self.open.len() >= MAX_DECISIONS {
            self.old = mem::take(&mut self.open);
        }
        self.open.insert(socket, steps);
    }

    /// Takes the lines of the last decision of a socket up to a time.
    fn take(&mut self, socket: u64, until: u64) -> Option<Vec<TraceStep>> {
        let at = self.decisions.iter().rposition(|it| it.socket == socket && it.time <= until)?;
        let found = self.decisions.remove(at).map(|it| it.steps);
        // Those before it had no event.
        self.decisions.retain(|it| it.socket != socket || it.time > until);
        found
    }
}

/// Counts lines, and hands them on.
struct Counted {
    each: Box<dyn Fn(&Record<'_>) + Send + Sync>,
    read: AtomicU64,
    /// Programs write no more lines from this one on.
    limit: AtomicU64,
    /// The map `LINES`.
    counts: Mutex<Array<MapData, u64>>,
}

impl Log for Counted {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let read = self.read.fetch_add(1, Ordering::Relaxed) + 1;
        // aya-log reads until there is nothing more, which programs on other CPUs could put off forever.
        if read == self.limit.load(Ordering::Relaxed) {
            // If it fails, they go on.
            let _ = self.counts.lock().set(LINES_PAUSED, 1, 0);
        }
        (self.each)(record);
    }

    fn flush(&self) {}
}

/// Reads the lines of the programs of an object.
struct LineReader {
    logger: EbpfLogger<Arc<Counted>>,
    counted: Arc<Counted>,
    /// How many lines seemed lost when they were last read.
    missing: u64,
    lost: u64,
}

impl LineReader {
    /// Takes the maps of lines out of the loaded object; hands each line to a function.
    fn take(ebpf: &mut Ebpf, each: impl Fn(&Record<'_>) + Send + Sync + 'static) -> Result<Self, Error> {
        let (each, counts) = (Box::new(each), Mutex::new(map_spec::take(ebpf, "LINES")?));
        let counted = Arc::new(Counted { each, read: AtomicU64::new(0), limit: AtomicU64::new(0), counts });
        let logger = EbpfLogger::init_with_logger(ebpf, Arc::clone(&counted));
        let logger = logger.map_err(|it| Error::Incomplete(format!("lines of log: {it}")))?;
        Ok(Self { logger, counted, missing: 0, lost: 0 })
    }

    fn read(&mut self) -> Result<(), Error> {
        let Counted { read, limit, counts, .. } = &*self.counted;
        limit.store(read.load(Ordering::Relaxed) + MAX_LINES, Ordering::Relaxed);
        let said = counts.lock().get(&LINES_SAID, 0).map_err(Error::map("LINES"))?;
        self.logger.flush();
        let read = read.load(Ordering::Relaxed);
        if read >= limit.load(Ordering::Relaxed) {
            counts.lock().set(LINES_PAUSED, 0, 0).map_err(Error::map("LINES"))?;
        }
        let missing = said.saturating_sub(read);
        // A line that another CPU was writing may hold up those behind it, once.
        self.lost = self.lost.max(missing.min(mem::replace(&mut self.missing, missing)));
        Ok(())
    }
}

pub(crate) struct TraceSteps {
    reader: LineReader,
    collected: Arc<Mutex<Collected>>,
}

impl TraceSteps {
    /// Takes the maps of lines out of the loaded object.
    pub(crate) fn take(ebpf: &mut Ebpf) -> Result<Self, Error> {
        let collected = Arc::new(Mutex::new(Collected::default()));
        let lines = Arc::clone(&collected);
        let reader = LineReader::take(ebpf, move |record| {
            if let Some(line) = Line::parse(record.level(), &record.args().to_string()) {
                lines.lock().add(line);
            }
        })?;
        Ok(Self { reader, collected })
    }

    /// Reads the lines so far, unless there are enough decisions whose events were not read (`is_behind`). Those whose events were
    /// lost are dropped, the oldest first.
    pub(crate) fn read(&mut self, is_behind: bool) -> Result<(), Error> {
        let excess = self.collected.lock().decisions.len().saturating_sub(MAX_DECISIONS);
        if excess > 0 && is_behind {
            return Ok(());
        }
        self.collected.lock().decisions.drain(..excess);
        self.reader.read()
    }

    pub(crate) fn lost(&self) -> u64 {
        self.reader.lost
    }

    /// Takes those of the last decision of a socket up to a time, in nanoseconds of the monotonic clock.
    pub(crate) fn take_decision(&self, socket: u64, until: u64) -> Option<Vec<TraceStep>> {
        self.collected.lock().take(socket, until)
    }
}

/// Up to which level the product's programs say lines: none, but in a developer's build as this process.
pub(crate) fn level() -> Option<Level> {
    if cfg!(feature = "log") {
        // Both crates name their levels alike.
        tracing::level_filters::LevelFilter::current().into_level().and_then(|it| it.as_str().parse().ok())
    } else {
        None
    }
}

/// Logs the lines of the product's programs from now on, in a developer's build.
pub(crate) fn forward(ebpf: &mut Ebpf) -> Result<(), Error> {
    if level().is_none() {
        return Ok(());
    }
    let mut reader = LineReader::take(ebpf, log_line)?;
    let forward = move || {
        let mut lost = 0;
        while reader.read().is_ok() {
            if reader.lost > lost {
                tracing::warn!(lost = reader.lost - lost, "lines of programs were lost");
                lost = reader.lost;
            }
            thread::sleep(FORWARD_INTERVAL);
        }
    };
    thread::Builder::new()
        .name("program-log".into())
        .spawn(forward)
        .map(drop)
        .map_err(Error::syscall("clone", "a thread"))
}

/// Logs a line as this process does.
fn log_line(record: &Record<'_>) {
    let (file, line) = (record.file(), record.line());
    // A level must be a constant.
    macro_rules! log {
        ($level:ident) => {
            tracing::$level!(file, line, "{}", record.args())
        };
    }
    match record.level() {
        Level::Error => log!(error),
        Level::Warn => log!(warn),
        Level::Info => log!(info),
        Level::Debug => log!(debug),
        Level::Trace => log!(trace),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn parse(text: &str) -> Line {
        Line::parse(Level::Debug, text).unwrap()
    }

    #[test]
    fn a_line_has_a_message_and_fields() {
        let line = parse("socket=7 frontend: found set=5 endpoints=2");
        assert_eq!((line.socket, line.time), (7, None));
        assert_eq!(line.step.message, "frontend: found");
        assert_eq!(line.step.to_string(), "frontend: found set=5 endpoints=2");
        let line = parse("socket=7 decision: refused  time=9");
        assert_eq!((line.step.to_string().as_str(), line.time), ("decision: refused", Some(9)));
        assert_eq!(Line::parse(Level::Info, "of a developer"), None);
    }

    #[test]
    fn lines_are_put_together_by_decision() {
        let mut collected = Collected::default();
        for text in [
            "socket=1 prefilter: hit",
            "socket=2 prefilter: hit",
            "socket=1 frontend: none",
            "socket=1 decision: passed   time=10",
            // The end of this one was lost.
            "socket=1 prefilter: hit",
            "socket=1 endpoint: read position=1",
            "socket=1 prefilter: hit",
            "socket=1 decision: redirect time=30",
        ] {
            collected.add(parse(text));
        }
        let mut take = |socket, until| {
            let steps = collected.take(socket, until)?;
            Some(steps.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(take(1, 9), None);
        assert_eq!(take(2, 100), None, "it is not complete");
        assert_eq!(take(1, 29).unwrap(), ["prefilter: hit", "frontend: none", "decision: passed"]);
        assert_eq!(take(1, 31).unwrap(), ["prefilter: hit", "decision: redirect"]);
        assert_eq!(take(1, 31), None);
    }
}
