//! The log of what is rejected: the first parts, and how many more there are.
//!
//! Invariant: whatever the objects contain and however often they change, a log has at most [`MAX_LINES`] lines of them, and one
//! with the number of the others, in [`INTERVAL`].

use std::time::Duration;

use model::{Rejected, Rejections};
use tokio::time::Instant;

/// How many parts are logged in an interval.
const MAX_LINES: usize = 10;
const INTERVAL: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub struct RejectionLog {
    /// What was rejected at the last call.
    known: Rejections,
    /// Since when lines are counted.
    began: Option<Instant>,
    lines: usize,
    /// How many parts were not logged, and not counted in a line.
    more: usize,
    /// Whether this interval has its line with a number.
    is_counted: bool,
}

impl RejectionLog {
    /// Logs what was not rejected at the last call; whether anything differs from then.
    pub fn update(&mut self, rejections: &Rejections) -> bool {
        let now = Instant::now();
        if self.began.is_none_or(|it| now - it >= INTERVAL) {
            (self.began, self.lines, self.is_counted) = (Some(now), 0, false);
        }
        let has_changed = !rejections.ptr_eq(&self.known) && *rejections != self.known;
        if has_changed {
            for it in rejections.new_since(&self.known) {
                if self.lines < MAX_LINES {
                    self.lines += 1;
                    log_rejected(it);
                } else {
                    self.more += 1;
                }
            }
            self.known.clone_from(rejections);
        }
        if self.more > 0 && !self.is_counted {
            self.is_counted = true;
            let more = std::mem::take(&mut self.more);
            tracing::warn!(more, "more parts of objects are rejected; `status` has all of them");
        }
        has_changed
    }

    /// Logs how many parts were left out, once their interval is over. To be called now and then.
    pub fn remind(&mut self) {
        if self.more > 0 {
            let known = self.known.clone();
            self.update(&known);
        }
    }
}

pub fn log_rejected(it: &Rejected) {
    let Rejected { item, reason, .. } = it;
    if it.is_served() {
        tracing::warn!(%item, %reason, "served otherwise than written");
    } else {
        tracing::warn!(%item, %reason, "not served");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn of_many_rejected_parts_the_first_are_logged_and_the_others_counted() {
        let mut log = RejectionLog::default();
        let mut all = Rejections::default();
        let mut add = |log: &mut RejectionLog, numbers: std::ops::Range<usize>| {
            for it in numbers {
                let object = format!("Service a/{it}");
                all.set(&object, vec![Rejected::not_served(&*object, "no")]);
            }
            assert!(log.update(&all) && !log.update(&all), "once for a change");
            (log.lines, log.more, log.is_counted)
        };
        assert_eq!(add(&mut log, 0..4), (4, 0, false));
        assert_eq!(add(&mut log, 4..1_000), (10, 0, true));
        assert_eq!(add(&mut log, 1_000..1_500), (10, 500, true), "the number of these comes later");
        tokio::time::advance(INTERVAL).await;
        log.remind();
        assert_eq!((log.lines, log.more, log.is_counted), (0, 0, true));
        assert_eq!(add(&mut log, 1_500..1_501), (1, 0, true));
    }
}
