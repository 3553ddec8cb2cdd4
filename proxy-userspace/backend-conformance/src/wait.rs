//! Waits for the backend: their time limit, and a report of a long one.

use std::time::{Duration, Instant};

/// A wait of this length is reported.
const LONG_WAIT: Duration = Duration::from_secs(2);

pub(crate) struct Wait<'a> {
    limit: Duration,
    progress: &'a dyn Fn(&str),
    case: &'a str,
    is_reported: bool,
}

impl<'a> Wait<'a> {
    pub(crate) fn new(limit: Duration, progress: &'a dyn Fn(&str)) -> Self {
        Self { limit, progress, case: "", is_reported: false }
    }

    pub(crate) fn begin_case(&mut self, name: &'a str) {
        (self.case, self.is_reported) = (name, false);
    }

    /// The time limit, in seconds.
    pub(crate) fn seconds(&self) -> u64 {
        self.limit.as_secs()
    }

    /// Whether a wait has exceeded the time limit; reports the first long wait of a case.
    pub(crate) fn is_over(&mut self, begin: Instant) -> bool {
        let waited = begin.elapsed();
        if waited > LONG_WAIT && waited < self.limit && !self.is_reported {
            self.is_reported = true;
            let (waited, limit) = (LONG_WAIT.as_secs(), self.seconds());
            (self.progress)(&format!(
                "wait  {}: no right answer within {waited} s; waiting up to {limit} s",
                self.case
            ));
        }
        waited > self.limit
    }
}
