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
    /// Number of objects.
    pub objects: usize,
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
    }
}
