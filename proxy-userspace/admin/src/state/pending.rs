//! Since when changes wait until they are active.

use tokio::time::Instant;

#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// Arrival of the oldest change that is not active.
    pub(super) since: Option<Instant>,
    /// Arrival of the oldest change after the state that is being applied.
    next_since: Option<Instant>,
    /// Arrival of the oldest change of the last dequeued state.
    dequeued_since: Option<Instant>,
    /// Instance and revision of the last dequeued state.
    last_dequeued: Option<(u64, u64)>,
}

impl Pending {
    pub(super) fn on_published(&mut self, now: Instant) {
        self.since.get_or_insert(now);
        self.next_since.get_or_insert(now);
    }

    /// Returns whether this is a retry.
    pub(super) fn on_dequeued(&mut self, key: (u64, u64)) -> bool {
        let since = self.next_since.take();
        let is_retry = self.last_dequeued.replace(key) == Some(key);
        if !is_retry {
            self.dequeued_since = since;
        }
        is_retry
    }

    pub(super) fn on_applied(&mut self, key: (u64, u64)) {
        // One half of the datapath may have taken a newer state meanwhile.
        let is_last = self.last_dequeued.is_none_or(|it| it == key);
        self.since = if is_last { self.next_since } else { self.dequeued_since.or(self.next_since) };
    }
}
