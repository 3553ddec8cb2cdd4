//! Timeouts and delays of requests to the API server.

use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The maximum delay after the first failure, and after many.
    pub backoff: (Duration, Duration),
    /// The maximum delay while the server cannot be reached, and in the first minute after that.
    pub max_unreachable_delay: Duration,
    /// How long to wait for a response, for the next part of a list, and for the end of a streaming list.
    pub timeout: Duration,
    /// How long an HTTP/2 connection may be silent before it is pinged, and how long to wait for the answer.
    pub ping: (Duration, Duration),
    /// How long a watch lasts that is not pinged, in whole seconds, and up to half of it more: that it does not end shows
    /// that its connection is dead.
    pub unpinged_watch: Duration,
    /// How much longer a watch may last than it should before its connection counts as dead.
    pub watch_slack: Duration,
    /// How long the server may neither answer a request nor send a changed object before it is asked for its version, and
    /// how long to wait for the answer. The first is up to a fifth shorter, at random.
    pub idle: (Duration, Duration),
    /// After this time a server whose streaming list has failed is asked for one again.
    pub streaming_retry: Duration,
    /// After this time a server that does not have or permit an optional resource is asked for it again.
    pub missing_retry: Duration,
    /// How often the end of a plugin's credentials is looked at: several times in their last minute, in which they are renewed.
    pub renewal: Duration,
}

impl Timing {
    pub(super) fn max_delay(&self, is_soon: bool) -> Duration {
        if is_soon { self.max_unreachable_delay } else { Duration::MAX / 2 }
    }
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            backoff: (Duration::from_millis(500), Duration::from_secs(30)),
            max_unreachable_delay: Duration::from_secs(2),
            timeout: Duration::from_secs(30),
            ping: (Duration::from_secs(30), Duration::from_secs(15)),
            unpinged_watch: Duration::from_secs(20),
            watch_slack: Duration::from_secs(15),
            idle: (Duration::from_secs(45), Duration::from_secs(15)),
            streaming_retry: Duration::from_secs(600),
            missing_retry: Duration::from_secs(600),
            renewal: Duration::from_secs(15),
        }
    }
}
