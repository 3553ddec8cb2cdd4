//! The Services that are served, with their rates: two readings of the counters, and what is kept of earlier ones.
//!
//! Invariant: its memory is bounded for each Service, and readings that came without a pause cost no more than one a second.

use std::{collections::BTreeMap, mem, sync::Arc, time::Duration};

use datapath::PortCounts;
use model::{ServiceName, state::ServiceState};
use publish::Published;
use tokio::time::Instant;

use crate::state::{PortCountLookup, rates};

/// How many rates a plot shows.
pub(super) const HISTORY: usize = 60;
/// The shortest time between two readings.
pub(super) const INTERVAL: Duration = Duration::from_millis(950);
/// After this time without a reading, plots begin anew: each step of a plot is about a second.
const MAX_GAP: Duration = Duration::from_secs(5);
/// The order by rates follows the mean of so many of them, so that rows stay where they are.
const MEAN_OF: usize = 10;

/// The Services that are served.
#[derive(Default)]
pub(super) struct Board {
    /// The state that they are of.
    published: Option<Arc<Published>>,
    pub(super) rows: BTreeMap<ServiceName, Row>,
    /// Over all Services.
    pub(super) total: Rates,
    /// When the last reading was.
    pub(super) at: Option<Instant>,
    /// What was read then; `None` if there are no counters.
    pub(super) counters: Option<PortCountLookup>,
}

pub(super) struct Row {
    pub(super) state: Arc<ServiceState>,
    pub(super) counts: Option<PortCounts>,
    pub(super) rates: Rates,
}

pub(super) type Rates = rates::Rates<HISTORY>;

/// What rows are ordered by: the largest value first, then the name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SortBy {
    #[default]
    Connections,
    Failing,
    Endpoints,
    Name,
}

impl SortBy {
    pub(super) fn parse(text: &str) -> Self {
        match text {
            "failing" => Self::Failing,
            "endpoints" => Self::Endpoints,
            "name" => Self::Name,
            _ => Self::Connections,
        }
    }
}

/// The mean of the newest rates of connections.
fn mean(Rates { connections, .. }: &Rates) -> f64 {
    connections.iter().rev().take(MEAN_OF).sum::<f64>() / connections.len().clamp(1, MEAN_OF) as f64
}

impl Board {
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.at.is_none_or(|it| now.duration_since(it) >= INTERVAL)
    }

    /// Takes the state that is served.
    pub(super) fn set_state(&mut self, published: Option<Arc<Published>>) {
        let revision = |it: &Option<Arc<Published>>| it.as_deref().map(Published::revision);
        if revision(&published) == revision(&self.published) {
            return;
        }
        let mut before = mem::take(&mut self.rows);
        let services = published.iter().flat_map(|it| it.state.services.values());
        let row = |state: &Arc<ServiceState>| {
            let name = state.service.name.clone();
            let (counts, rates) = before.remove(&name).map(|it| (it.counts, it.rates)).unwrap_or_default();
            (name, Row { state: Arc::clone(state), counts, rates })
        };
        self.rows = services.map(row).collect();
        self.published = published;
    }

    /// Takes a reading; `None` if there are no counters.
    pub(super) fn update(&mut self, counters: Option<PortCountLookup>, now: Instant) {
        let since = self.at.replace(now).map(|it| now.duration_since(it));
        let is_continued = since.is_some_and(|it| it <= MAX_GAP);
        let seconds = since.filter(|_| is_continued).map(|it| it.as_secs_f64().max(1e-3));
        let (mut total, mut total_before) = (PortCounts::default(), PortCounts::default());
        for row in self.rows.values_mut() {
            let counts = counters.as_ref().map(|it| it.total(&row.state.service));
            let before = mem::replace(&mut row.counts, counts);
            if !is_continued {
                row.rates = Rates::default();
            }
            if let (Some(now), Some(before), Some(seconds)) = (counts, before, seconds) {
                row.rates.add(now, before, seconds);
                // What was reset counts for nothing.
                if now.connections >= before.connections {
                    total += now;
                    total_before += before;
                }
            }
        }
        if !is_continued {
            self.total = Rates::default();
        }
        if let (Some(seconds), true) = (seconds, counters.is_some()) {
            self.total.add(total, total_before, seconds);
        }
        self.counters = counters;
    }

    pub(super) fn is_counted(&self) -> bool {
        self.counters.is_some()
    }

    /// The Services that have every word of a search, in order.
    pub(super) fn find(
        &self,
        search: &str,
        sort: SortBy,
        ejected: impl Fn(&ServiceName) -> usize,
    ) -> Vec<&Row> {
        let search = search.to_lowercase();
        let words: Vec<_> = search.split_whitespace().collect();
        let has_words = |row: &&Row| {
            let text = if words.is_empty() { String::new() } else { text(&row.state) };
            words.iter().all(|it| text.contains(it))
        };
        let mut rows: Vec<_> = self.rows.values().filter(has_words).collect();
        let milli = |it: f64| (it * 1e3) as u64;
        // The sort is stable: equal ones stay in the order of their names.
        match sort {
            SortBy::Connections => rows.sort_by_cached_key(|it| {
                let so_far = it.counts.map(|it| it.connections).unwrap_or_default();
                std::cmp::Reverse((milli(mean(&it.rates)), so_far))
            }),
            SortBy::Failing => rows.sort_by_cached_key(|it| {
                let name = &it.state.service.name;
                let failing = milli(it.rates.refused + it.rates.denied);
                std::cmp::Reverse((failing, ejected(name), it.state.endpoints.is_empty()))
            }),
            SortBy::Endpoints => {
                rows.sort_by_key(|it| std::cmp::Reverse(it.state.endpoints.len()));
            }
            SortBy::Name => {}
        }
        rows
    }
}

/// What a search looks at, in lower case: name, addresses and ports.
fn text(state: &ServiceState) -> String {
    let service = &state.service;
    let addresses = service.addresses().map(|it| it.to_string());
    let ports = service.ports.iter().flat_map(|it| {
        let number = format!("{}/{}", it.port, it.protocol);
        [it.name.clone(), number].into_iter().chain(it.node_port.map(|it| it.to_string()))
    });
    let words: Vec<_> = [service.name.to_string()].into_iter().chain(addresses).chain(ports).collect();
    words.join(" ").to_lowercase()
}

#[cfg(test)]
mod tests {
    use publish::Publisher;

    use super::*;
    use crate::fixtures::{FixedCounts, published, service};

    /// A board with the Services `a` and `b`, and what is published after it.
    struct Test {
        board: Board,
        publisher: Publisher,
        now: Instant,
    }

    impl Test {
        fn new() -> Self {
            let mut test =
                Self { board: Board::default(), publisher: Publisher::new("n1"), now: Instant::now() };
            test.set(&["a", "b"]);
            test
        }

        fn set(&mut self, names: &[&str]) {
            let services = names.iter().map(|it| service(it, 2, None));
            self.board.set_state(Some(published(&self.publisher, services)));
        }

        /// A reading after some milliseconds, with the connections of each Service.
        fn read(&mut self, millis: u64, connections: &[(&'static str, u64)]) {
            self.now += Duration::from_millis(millis);
            self.board.update(Some(FixedCounts::of(connections)), self.now);
        }

        fn names(&self, search: &str, sort: SortBy) -> Vec<&str> {
            let rows = self.board.find(search, sort, |_| 0);
            rows.into_iter().map(|it| &*it.state.service.name.name).collect()
        }

        fn history(&self, name: &str) -> Vec<f64> {
            let row = self.board.rows.get(&ServiceName::new("default", name)).unwrap();
            row.rates.connections.iter().collect()
        }
    }

    #[test]
    fn rates_are_those_between_two_readings() {
        let mut test = Test::new();
        test.read(0, &[("a", 100), ("b", 5)]);
        assert_eq!(
            test.names("", SortBy::Connections),
            ["a", "b"],
            "without rates by the connections so far"
        );
        test.read(2000, &[("a", 102), ("b", 45)]);
        assert_eq!((test.history("a"), test.history("b")), (vec![1.0], vec![20.0]));
        assert_eq!(test.names("", SortBy::Connections), ["b", "a"]);
        assert_eq!(test.names("", SortBy::Name), ["a", "b"]);
        assert!((test.board.total.connections.now() - 21.0).abs() < 1e-6);
        // A counter that begins anew.
        test.read(1000, &[("a", 112), ("b", 7)]);
        assert_eq!((test.history("a"), test.history("b")), (vec![1.0, 10.0], vec![20.0, 0.0]));
        assert!((test.board.total.connections.now() - 10.0).abs() < 1e-6);
    }

    #[test]
    fn a_new_state_keeps_the_rates_of_services_that_stay() {
        let mut test = Test::new();
        test.read(0, &[]);
        test.read(1000, &[("a", 1), ("b", 2)]);
        test.set(&["b", "c"]);
        assert_eq!((test.history("b"), test.history("c")), (vec![2.0], vec![]));
        // The first reading of a Service says nothing of its rate.
        test.read(1000, &[("b", 3), ("c", 99)]);
        assert_eq!((test.history("b"), test.history("c")), (vec![2.0, 1.0], vec![]));
        assert!((test.board.total.connections.now() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn plots_are_bounded_and_begin_anew_after_a_pause() {
        let mut test = Test::new();
        (0..2 * HISTORY).for_each(|_| test.read(1000, &[]));
        assert_eq!(test.history("a").len(), HISTORY);
        assert!(!test.board.is_due(test.now) && test.board.is_due(test.now + INTERVAL));
        test.read(60_000, &[]);
        assert_eq!(test.history("a").len(), 0);
        test.board.update(None, test.now + INTERVAL);
        assert!(!test.board.is_counted());
    }

    #[test]
    fn a_search_finds_names_addresses_and_ports() {
        let test = Test::new();
        for (search, expect) in [
            ("DEFAULT/A", vec!["a"]),
            ("10.96.0.1 b", vec!["b"]),
            ("80/tcp", vec!["a", "b"]),
            ("nothing", vec![]),
        ] {
            assert_eq!(test.names(search, SortBy::Name), expect, "{search}");
        }
    }
}
