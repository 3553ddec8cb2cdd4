//! The queue between the log and standard error.
//!
//! Invariant: an event never waits for the reader of standard error. The queue is bounded; lines without room are counted, and
//! the count takes their place in the log.

use std::{collections::VecDeque, io::Write, time::Duration};

use parking_lot::{Condvar, Mutex};

/// How many bytes wait at most.
const MAX_QUEUED: usize = 1 << 20;
/// After a loss, lines are queued again once fewer bytes than this wait: one count for many lost lines.
const RESUME_QUEUED: usize = MAX_QUEUED / 2;

/// Lines that are to be written.
#[derive(Debug)]
pub(super) struct LogQueue {
    queued: Mutex<Queued>,
    changed: Condvar,
}

#[derive(Debug)]
struct Queued {
    entries: VecDeque<Entry>,
    /// The size of all lines, without the one that is being written.
    bytes: usize,
    is_writing: bool,
}

#[derive(Debug)]
enum Entry {
    Line(Vec<u8>),
    /// So many lines were lost here.
    Lost(u64),
}

impl LogQueue {
    pub(super) const fn new() -> Self {
        let queued = Queued { entries: VecDeque::new(), bytes: 0, is_writing: false };
        Self { queued: Mutex::new(queued), changed: Condvar::new() }
    }

    /// Adds a line, or counts it as lost.
    pub(super) fn push(&self, line: &[u8]) {
        let mut queued = self.queued.lock();
        let has_lost = matches!(queued.entries.back(), Some(Entry::Lost(_)));
        let limit = if has_lost { RESUME_QUEUED } else { MAX_QUEUED };
        if queued.bytes + line.len() <= limit {
            queued.bytes += line.len();
            queued.entries.push_back(Entry::Line(line.to_vec()));
        } else if let Some(Entry::Lost(count)) = queued.entries.back_mut() {
            *count += 1;
        } else {
            queued.entries.push_back(Entry::Lost(1));
        }
        self.changed.notify_all();
    }

    /// Writes the lines to `output` as they come, and has lost ones reported in their place; never returns.
    pub(super) fn write_to(&self, mut output: impl Write, report_lost: impl Fn(u64)) -> ! {
        let mut queued = self.queued.lock();
        loop {
            let Some(entry) = queued.entries.pop_front() else {
                self.changed.wait(&mut queued);
                continue;
            };
            queued.is_writing = true;
            if let Entry::Line(line) = &entry {
                queued.bytes -= line.len();
            }
            drop(queued);
            match entry {
                // Without a reader at all there is no log.
                Entry::Line(line) => drop(output.write_all(&line)),
                Entry::Lost(count) => report_lost(count),
            }
            queued = self.queued.lock();
            queued.is_writing = false;
            self.changed.notify_all();
        }
    }

    /// Waits until everything is written, for this time at most.
    pub(super) fn flush(&self, limit: Duration) {
        let is_busy = |it: &mut Queued| it.is_writing || !it.entries.is_empty();
        self.changed.wait_while_for(&mut self.queued.lock(), is_busy, limit);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, pipe},
        sync::Arc,
        thread,
    };

    use super::*;

    #[test]
    fn a_line_waits_for_no_reader_and_lost_ones_are_counted_in_their_place() {
        let queue = Arc::new(LogQueue::new());
        let (reader, output) = pipe().unwrap();
        let (writer, reports) = (Arc::clone(&queue), output.try_clone().unwrap());
        thread::spawn(move || writer.write_to(output, |count| writeln!(&reports, "{count} lost").unwrap()));
        const LINES: usize = 20_000;
        (0..LINES).for_each(|it| queue.push(format!("{it:0>99}\n").as_bytes()));
        queue.flush(Duration::ZERO);

        let mut lines = BufReader::new(reader).lines().map(|it| it.unwrap());
        let (mut next, mut lost) = (0, 0);
        while next < LINES {
            let line = lines.next().unwrap();
            match line.strip_suffix(" lost") {
                Some(count) => {
                    lost += count.parse::<usize>().unwrap();
                    next += count.parse::<usize>().unwrap();
                }
                None => {
                    assert_eq!(line.trim_start_matches('0').parse().unwrap_or(0), next);
                    next += 1;
                }
            }
        }
        assert!(lost > 0 && lost <= LINES - MAX_QUEUED / 100, "{lost}");
        // With a reader, nothing is lost.
        queue.push(b"again\n");
        assert_eq!(lines.next().unwrap(), "again");
    }
}
