//! EventType is known of the connection to the API server, kind by kind.
//!
//! The one rule: it says how old the facts are, whatever happens.

use std::time::Duration;

use tokio::time::Instant;

/// How following one kind goes.
#[derive(Clone, Debug)]
pub struct ResourceStatus {
    /// As in the API's paths: `services`, `endpointslices`, `nodes`.
    pub kind: &'static str,
    /// Whether all objects of the kind have been listed at least once.
    pub is_synced: bool,
    /// When the server last said something about the kind, be it that nothing is new.
    pub last_contact: Option<Instant>,
    /// EventType is wrong, while something is.
    pub error: Option<String>,
    /// Since when something has been wrong.
    pub failing_since: Option<Instant>,
    /// How many objects there are.
    pub objects: usize,
    /// How many parts of them are refused.
    pub refused: usize,
}

impl ResourceStatus {
    pub(super) fn new(kind: &'static str) -> Self {
        Self {
            kind,
            is_synced: false,
            last_contact: None,
            error: None,
            failing_since: None,
            objects: 0,
            refused: 0,
        }
    }

    /// How old the facts of this kind may be: none have been seen, or the time since the last contact.
    pub fn age(&self) -> Option<Duration> {
        self.last_contact.filter(|_| self.is_synced).map(|it| it.elapsed())
    }

    /// The server has answered.
    pub(super) fn contact(&mut self) {
        self.last_contact = Some(Instant::now());
        self.error = None;
        if let Some(since) = self.failing_since.take() {
            tracing::info!("{}: followed again, after {:.1?}", self.kind, since.elapsed());
        }
    }

    /// It has not, or something else than was asked for.
    pub(super) fn failed(&mut self, error: &str, next: Instant) {
        let now = Instant::now();
        self.failing_since.get_or_insert(now);
        if self.error.as_deref() == Some(error) {
            return;
        }
        let pause = next.saturating_duration_since(now);
        match self.age() {
            Some(age) => tracing::warn!(
                "{error}; what was known stays in force, it is {age:.1?} old; trying again in {pause:.1?}"
            ),
            None => tracing::warn!("{error}; there are no facts yet; trying again in {pause:.1?}"),
        }
        self.error = Some(error.to_owned());
    }
}
