//! When endpoints that fail are ejected, unless their Service says otherwise.

use std::{num::NonZeroU8, time::Duration};

/// When endpoints that fail are ejected on this node (`--passive-health…`), unless their Service says otherwise
/// ([`PassiveHealth`](model::state::PassiveHealth)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassiveHealthOptions {
    pub enabled: bool,
    /// Consecutive failures after which an endpoint is ejected, 1 to 50.
    pub failures: NonZeroU8,
    /// How much of a set may be ejected, 1 to 100 percent; the last endpoint never is.
    pub max_ejected_percent: NonZeroU8,
    /// How long an endpoint is ejected for the first time, a second to an hour; each further time in sequence twice as
    /// long.
    pub ejection_time: Duration,
    /// How long it is ejected at most: `ejection_time` to a day.
    pub max_ejection_time: Duration,
}
