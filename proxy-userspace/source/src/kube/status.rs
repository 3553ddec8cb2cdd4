//! The status of the watch of one resource: how old the known state is, and the current error.

use std::time::Duration;

use tokio::time::Instant;

/// The status of the watch of one resource.
#[derive(Clone, Debug, Default)]
pub struct ResourceStatus {
    /// The resource, as in the API's paths: `services`, `endpointslices`, `nodes`.
    pub resource: &'static str,
    /// Whether all objects have been listed at least once.
    pub is_synced: bool,
    /// When the server last responded, be it only that nothing has changed.
    pub last_contact: Option<Instant>,
    /// The current error.
    pub error: Option<String>,
    /// Since when requests have failed.
    pub failing_since: Option<Instant>,
    /// Number of objects.
    pub objects: usize,
    /// Number of rejected parts of objects.
    pub rejected: usize,
}

impl ResourceStatus {
    pub(super) fn new(resource: &'static str) -> Self {
        Self { resource, ..Self::default() }
    }

    /// The time since the last contact, which is the maximum age of the known state; `None` before the first list.
    pub fn age(&self) -> Option<Duration> {
        self.last_contact.filter(|_| self.is_synced).map(|it| it.elapsed())
    }

    /// The server has responded.
    pub(super) fn contact(&mut self) {
        self.last_contact = Some(Instant::now());
        self.error = None;
        if let Some(since) = self.failing_since.take() {
            tracing::info!("{}: connected again after {:.1?}", self.resource, since.elapsed());
        }
    }

    /// A request has failed; the next one is at `next`.
    pub(super) fn failed(&mut self, error: &str, next: Instant) {
        let now = Instant::now();
        self.failing_since.get_or_insert(now);
        if self.error.as_deref() == Some(error) {
            return;
        }
        let delay = next.saturating_duration_since(now);
        // The same error again is not logged, so that an outage does not fill the log.
        match self.age() {
            Some(age) => {
                let age = if age.as_secs() == 0 { String::new() } else { format!(", {age:.0?} old,") };
                tracing::warn!(
                    "{error}; the last state{age} stays active; retrying in {delay:.1?}, and then silently"
                );
            }
            None => tracing::warn!("{error}; there is no cluster state yet; retrying in {delay:.1?}"),
        }
        self.error = Some(error.to_owned());
    }
}
