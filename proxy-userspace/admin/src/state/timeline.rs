//! The newest generations: what each changed, and when each of its steps ended.
//!
//! Invariant: it is bounded, and recording costs what a change touches. The steps of a published state are reported before
//! the state is.

use std::{collections::VecDeque, sync::Arc, time::SystemTime};

use datapath::ApplyReport;
use model::{ServiceName, state::ServiceState};
use pipeline::PublishSteps;
use publish::Published;
use tokio::time::Instant;

use crate::state::{Moment, triggered};

pub(crate) const MAX_GENERATIONS: usize = 128;
/// How many changed Services are named for each.
const MAX_NAMED: usize = 6;

/// The newest generations, in the order in which they were published.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    generations: VecDeque<Generation>,
    /// Counts changes of any generation: what has a higher version than a client has seen is new to it.
    pub(crate) version: u64,
    /// The steps of the state that was published last.
    steps: Option<PublishSteps>,
}

/// A state that was published.
#[derive(Debug, Default)]
pub(crate) struct Generation {
    /// Its instance and revision.
    pub(crate) key: (u64, u64),
    /// The version of the timeline since when it is as it is.
    pub(crate) version: u64,
    /// When its last change happened in the cluster, where the cluster says so.
    pub(crate) triggered: Option<SystemTime>,
    /// When it was received and computed, where this process does that.
    pub(crate) computing: Option<(Instant, Instant)>,
    /// When it was published, or when it was received from the brain that published it.
    pub(crate) published: Moment,
    /// When the reconciler took it.
    pub(crate) dequeued: Option<Instant>,
    /// When it was active.
    pub(crate) active: Option<Instant>,
    /// Whether it is superseded and never was active.
    pub(crate) is_skipped: bool,
    /// The changed Services: the first few.
    pub(crate) changes: Vec<ServiceChange>,
    /// How many there are in all.
    pub(crate) changed: usize,
    /// How many entries were written into the kernel.
    pub(crate) entries: usize,
    /// Whether these were all entries, rather than the difference.
    pub(crate) is_full: bool,
    /// How often applying it failed, and the last error.
    pub(crate) failures: usize,
    pub(crate) error: Option<String>,
}

/// What became of a Service.
#[derive(Debug)]
pub(crate) struct ServiceChange {
    pub(crate) service: ServiceName,
    /// Its number of endpoints before and after; none where it does not exist.
    pub(crate) endpoints: (Option<usize>, Option<usize>),
    /// Whether more than endpoints changed.
    pub(crate) is_redefined: bool,
}

/// What differs between two states.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    named: Vec<ServiceChange>,
    count: usize,
    triggered: Option<SystemTime>,
}

impl Changes {
    pub(crate) fn add(
        &mut self,
        name: &ServiceName,
        before: Option<&Arc<ServiceState>>,
        after: Option<&Arc<ServiceState>>,
    ) {
        self.triggered = self.triggered.max(triggered(before, after));
        self.count += 1;
        if self.named.len() < MAX_NAMED {
            let count = |it: Option<&Arc<ServiceState>>| it.map(|it| it.endpoints.len());
            let is_redefined =
                before.zip(after).is_some_and(|(before, after)| before.service != after.service);
            let endpoints = (count(before), count(after));
            self.named.push(ServiceChange { service: name.clone(), endpoints, is_redefined });
        }
    }
}

impl Timeline {
    /// What has changed since a version, the oldest first.
    pub(crate) fn since(&self, version: u64) -> impl Iterator<Item = &Generation> {
        self.generations.iter().filter(move |it| it.version > version)
    }

    pub(crate) fn on_published(&mut self, published: &Published, changes: Changes, now: Moment) {
        let Changes { named, count, triggered } = changes;
        self.version += 1;
        let key = published.revision();
        let steps = self.steps.filter(|it| (it.instance_id, it.rev) == key);
        let generation = Generation {
            key,
            version: self.version,
            triggered,
            computing: steps.map(|it| (it.received, it.computed)),
            published: Moment { instant: steps.map_or(now.instant, |it| it.published), ..now },
            changes: named,
            changed: count,
            ..Generation::default()
        };
        if self.generations.len() == MAX_GENERATIONS {
            self.generations.pop_front();
        }
        self.generations.push_back(generation);
    }

    pub(crate) fn on_steps(&mut self, steps: &PublishSteps) {
        // The same state may be published again.
        if self.steps.is_none_or(|it| (it.instance_id, it.rev) != (steps.instance_id, steps.rev)) {
            self.steps = Some(*steps);
        }
    }

    pub(crate) fn on_dequeued(&mut self, published: &Published, now: Instant) {
        self.update(published.revision(), |it| {
            it.dequeued.get_or_insert(now);
        });
    }

    pub(crate) fn on_applied(&mut self, published: &Published, report: &ApplyReport, now: Instant) {
        let key = published.revision();
        self.update(key, |it| {
            if it.active.is_none() {
                (it.active, it.entries, it.is_full) = (Some(now), report.entries, report.is_full);
            }
            it.error = None;
        });
        let version = self.version;
        let before = self.generations.iter_mut().rev().skip_while(|it| it.key != key).skip(1);
        for it in before.take_while(|it| it.active.is_none() && !it.is_skipped) {
            (it.is_skipped, it.error, it.version) = (true, None, version);
        }
    }

    /// Applying the newest state failed.
    pub(crate) fn on_failed(&mut self, error: &str) {
        let newest = self.generations.iter().rev().find(|it| it.dequeued.is_some()).map(|it| it.key);
        if let Some(newest) = newest {
            self.update(newest, |it| {
                it.failures += 1;
                it.error = Some(error.to_owned());
            });
        }
    }

    fn update(&mut self, key: (u64, u64), change: impl FnOnce(&mut Generation)) {
        // The newest ones change.
        if let Some(it) = self.generations.iter_mut().rev().find(|it| it.key == key) {
            self.version += 1;
            it.version = self.version;
            change(it);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use model::state::NodeState;
    use publish::Publisher;

    use super::*;
    use crate::fixtures::{published, report, service};

    fn changes(before: &NodeState, after: &NodeState) -> Changes {
        let mut changes = Changes::default();
        after.diff(before).for_each(|(name, before, after)| changes.add(name, before, after));
        changes
    }

    #[test]
    fn a_generation_has_its_steps_and_what_it_changed() {
        let publisher = Publisher::new("n1");
        let first = published(&publisher, [service("a", 2, None), service("b", 0, None)]);
        let second = published(&publisher, [service("a", 3, Some(7.0))]);
        let (mut timeline, now) = (Timeline::default(), Moment::now());
        timeline.on_published(&first, changes(&NodeState::default(), &first.state), now);
        let seen = timeline.version;
        let at = |millis| now.instant + Duration::from_millis(millis);
        timeline.on_steps(&PublishSteps {
            instance_id: second.instance_id,
            rev: second.rev,
            received: at(1),
            computed: at(3),
            published: at(4),
        });
        timeline.on_published(&second, changes(&first.state, &second.state), now);
        timeline.on_dequeued(&second, at(6));
        timeline.on_failed("no room");
        assert_eq!(timeline.since(seen).last().unwrap().error.as_deref(), Some("no room"));
        timeline.on_applied(&second, &report(), at(9));
        let new: Vec<_> = timeline.since(seen).collect();
        assert_eq!(new.len(), 2, "the first one is superseded");
        assert!(new[0].is_skipped && new[0].active.is_none());
        let it = new[1];
        assert_eq!((it.computing, it.published.instant), (Some((at(1), at(3))), at(4)));
        assert_eq!((it.dequeued, it.active, it.failures), (Some(at(6)), Some(at(9)), 1));
        assert_eq!((&it.error, it.triggered), (&None, Some(SystemTime::UNIX_EPOCH + Duration::from_secs(7))));
        let changes: Vec<_> = it.changes.iter().map(|it| (&*it.service.name, it.endpoints)).collect();
        assert_eq!(changes, [("a", (Some(2), Some(3))), ("b", (Some(0), None))]);
        assert_eq!(timeline.since(timeline.version).count(), 0);
    }

    #[test]
    fn its_length_is_bounded_and_so_is_what_it_names() {
        let publisher = Publisher::new("n1");
        let mut timeline = Timeline::default();
        for n in 0..2 * MAX_GENERATIONS {
            let names: Vec<_> = (0..2 * MAX_NAMED).map(|it| format!("s{it}")).collect();
            let state = published(&publisher, names.iter().map(|it| service(it, n as u8, None)));
            timeline.on_published(&state, changes(&NodeState::default(), &state.state), Moment::now());
        }
        assert_eq!(timeline.since(0).count(), MAX_GENERATIONS);
        assert!(timeline.since(0).all(|it| it.changes.len() == MAX_NAMED && it.changed == 2 * MAX_NAMED));
    }
}
