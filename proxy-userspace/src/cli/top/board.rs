//! What is on the board: rates of two readings, sorted and filtered, and what keys do. Pure.

use std::{
    cmp::Reverse,
    collections::{HashMap, VecDeque},
    net::SocketAddr,
};

use clap::ValueEnum;
use datapath::PortId;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::sample::{PortSample, Sample};

/// How many rates a plot shows.
pub(super) const HISTORY: usize = 20;
/// How far a page key moves.
const PAGE: usize = 10;

/// The column that decides the order, the largest value first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum SortBy {
    /// Connections per second
    Connections,
    /// Connections per second that found no endpoint
    Refused,
    /// Calls per second that were denied for another reason
    Denied,
    /// Endpoints that some clients avoid
    Ejected,
    /// The name, in alphabetical order
    Name,
}

/// What a key leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Stay,
    Quit,
}

/// The board.
pub(super) struct Board {
    sort: SortBy,
    filter: String,
    is_filtering: bool,
    /// The selected service port, and whether its endpoints are shown.
    selected: Option<PortId>,
    is_opened: bool,
    sample: Option<Sample>,
    /// The rates of each service port, and of each of its endpoints, the newest one last.
    rates: HashMap<PortId, Rates>,
    /// The rates of a service port that was read once.
    no_rates: Rates,
    /// Why the last reading failed.
    failure: Option<String>,
}

/// The rates of a service port, per second.
#[derive(Default)]
pub(super) struct Rates {
    pub(super) connections: VecDeque<f64>,
    pub(super) refused: f64,
    pub(super) denied: f64,
    pub(super) endpoints: HashMap<SocketAddr, VecDeque<f64>>,
}

impl Rates {
    /// The newest rate of connections.
    pub(super) fn now(history: &VecDeque<f64>) -> f64 {
        history.back().copied().unwrap_or(0.0)
    }
}

impl Board {
    pub(super) fn new(sort: SortBy, filter: String) -> Self {
        Self {
            sort,
            filter,
            is_filtering: false,
            selected: None,
            is_opened: false,
            sample: None,
            rates: HashMap::new(),
            no_rates: Rates::default(),
            failure: None,
        }
    }

    /// Takes a new reading.
    pub(super) fn update(&mut self, sample: Sample) {
        self.failure = None;
        if let Some(before) = self.sample.take() {
            let seconds = sample.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
            // A counter of a Service that was away begins anew.
            let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
            let before: HashMap<_, _> = before.ports.iter().map(|it| (it.id, it)).collect();
            let mut last = std::mem::take(&mut self.rates);
            for now in &sample.ports {
                let Some(before) = before.get(&now.id) else { continue };
                let mut rates = last.remove(&now.id).unwrap_or_default();
                push(&mut rates.connections, rate(now.counts.connections, before.counts.connections));
                rates.refused = rate(now.counts.no_backend, before.counts.no_backend);
                rates.denied = rate(now.counts.denied, before.counts.denied);
                let counts: HashMap<_, _> = before.endpoints.iter().copied().collect();
                rates.endpoints.retain(|it, _| now.endpoints.iter().any(|(endpoint, _)| endpoint == it));
                for (endpoint, count) in &now.endpoints {
                    let before = counts.get(endpoint).copied().unwrap_or(*count);
                    push(rates.endpoints.entry(*endpoint).or_default(), rate(*count, before));
                }
                self.rates.insert(now.id, rates);
            }
        }
        self.sample = Some(sample);
    }

    /// The counters could not be read; what was read before stays.
    pub(super) fn fail(&mut self, error: String) {
        self.failure = Some(error);
    }

    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    pub(super) fn sort(&self) -> SortBy {
        self.sort
    }

    pub(super) fn filter(&self) -> &str {
        &self.filter
    }

    pub(super) fn is_filtering(&self) -> bool {
        self.is_filtering
    }

    pub(super) fn generation(&self) -> Option<u32> {
        self.sample.as_ref().map(|it| it.generation)
    }

    /// The service port whose endpoints are shown.
    pub(super) fn opened(&self) -> Option<(&PortSample, &Rates)> {
        let id = self.selected.filter(|_| self.is_opened)?;
        let port = self.sample.as_ref()?.ports.iter().find(|it| it.id == id)?;
        Some((port, self.rates_of(port)))
    }

    fn rates_of(&self, port: &PortSample) -> &Rates {
        self.rates.get(&port.id).unwrap_or(&self.no_rates)
    }

    /// The service ports that pass the filter, in order, each with its rates.
    pub(super) fn rows(&self) -> Vec<(&PortSample, &Rates)> {
        let ports = self.sample.iter().flat_map(|it| &it.ports);
        let mut rows: Vec<_> = ports
            .filter(|it| {
                [&*it.name.service, &*it.name.port, &*it.address].iter().any(|it| it.contains(&self.filter))
            })
            .map(|it| (it, self.rates_of(it)))
            .collect();
        rows.sort_by_cached_key(|row| {
            let (port, rates) = *row;
            let milli = |it: f64| (it * 1e3) as u64;
            let value = match self.sort {
                SortBy::Connections => milli(Rates::now(&rates.connections)),
                SortBy::Refused => milli(rates.refused),
                SortBy::Denied => milli(rates.denied),
                SortBy::Ejected => port.ejected.len() as u64,
                SortBy::Name => 0,
            };
            let PortSample { name, address, counts, .. } = port;
            let used = if self.sort == SortBy::Name { 0 } else { counts.connections };
            (Reverse(value), Reverse(used), &name.service, &name.port, address)
        });
        rows
    }

    /// The position of the selected service port in the rows.
    pub(super) fn position_in(&self, rows: &[(&PortSample, &Rates)]) -> Option<usize> {
        rows.iter().position(|(port, _)| Some(port.id) == self.selected)
    }

    /// Acts on a key.
    pub(super) fn press(&mut self, key: KeyEvent) -> Outcome {
        if key.kind == KeyEventKind::Release {
            return Outcome::Stay;
        }
        let is_interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            _ if is_interrupt => return Outcome::Quit,
            code if self.is_filtering => self.edit_filter(code),
            KeyCode::Char('q') => return Outcome::Quit,
            KeyCode::Char('c') => self.sort = SortBy::Connections,
            KeyCode::Char('r') => self.sort = SortBy::Refused,
            KeyCode::Char('d') => self.sort = SortBy::Denied,
            KeyCode::Char('e') => self.sort = SortBy::Ejected,
            KeyCode::Char('n') => self.sort = SortBy::Name,
            KeyCode::Char('/') => (self.is_filtering, self.is_opened) = (true, false),
            KeyCode::Up | KeyCode::Char('k') => self.select(|it, _| it.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(|it, _| it + 1),
            KeyCode::PageUp => self.select(|it, _| it.saturating_sub(PAGE)),
            KeyCode::PageDown => self.select(|it, _| it + PAGE),
            KeyCode::Home => self.select(|_, _| 0),
            KeyCode::End => self.select(|_, last| last),
            KeyCode::Enter => {
                if self.position_in(&self.rows()).is_none() {
                    self.select(|_, _| 0);
                }
                self.is_opened = true;
            }
            KeyCode::Esc | KeyCode::Backspace if self.is_opened => self.is_opened = false,
            KeyCode::Esc if !self.filter.is_empty() => self.filter.clear(),
            KeyCode::Esc => return Outcome::Quit,
            _ => {}
        }
        Outcome::Stay
    }

    fn edit_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(it) => self.filter.push(it),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Enter => self.is_filtering = false,
            KeyCode::Esc => {
                self.filter.clear();
                self.is_filtering = false;
            }
            _ => {}
        }
    }

    /// Selects the row that `of` names, given the position of the selected one and the last one. The first key selects the
    /// first row.
    fn select(&mut self, of: impl Fn(usize, usize) -> usize) {
        let rows = self.rows();
        let Some(last) = rows.len().checked_sub(1) else { return };
        let position = self.position_in(&rows).map_or(0, |it| of(it, last).min(last));
        self.selected = rows.get(position).map(|(port, _)| port.id);
    }
}

fn push(history: &mut VecDeque<f64>, rate: f64) {
    if history.len() == HISTORY {
        history.pop_front();
    }
    history.push_back(rate);
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        time::{Duration, Instant},
    };

    use datapath::PortCounts;

    use super::*;
    use crate::cli::status::PortName;

    const SECOND: Duration = Duration::from_secs(1);

    fn port(id: u64, name: &str, connections: u64, refused: u64) -> PortSample {
        PortSample {
            id: PortId(id),
            name: PortName { service: name.into(), port: "http".into() },
            address: format!("10.96.0.{id}:80/TCP"),
            endpoint_count: 1,
            counts: PortCounts { connections, no_backend: refused, ..PortCounts::default() },
            endpoints: vec![(SocketAddr::from(([10, 0, 0, 1], 80)), connections)],
            ejected: BTreeSet::new(),
        }
    }

    fn press(board: &mut Board, keys: &[KeyCode]) -> Outcome {
        keys.iter().map(|it| board.press((*it).into())).last().unwrap()
    }

    fn type_in(board: &mut Board, text: &str) {
        for it in text.chars() {
            assert_eq!(board.press(KeyCode::Char(it).into()), Outcome::Stay);
        }
    }

    fn position(board: &Board) -> Option<usize> {
        board.position_in(&board.rows())
    }

    fn names(board: &Board) -> Vec<&str> {
        board.rows().iter().map(|(port, _)| &*port.name.service).collect()
    }

    /// A second in which `a` had 10 connections, `b` 30, and `c` none, but 5 refused ones.
    fn board() -> Board {
        let mut board = Board::new(SortBy::Connections, String::new());
        let at = Instant::now();
        board.update(Sample {
            at,
            generation: 1,
            ports: vec![port(1, "ns/a", 1000, 0), port(2, "ns/b", 5, 0), port(3, "ns/c", 7, 0)],
        });
        assert_eq!(names(&board), ["ns/a", "ns/c", "ns/b"], "without rates by the connections so far");
        board.update(Sample {
            at: at + SECOND,
            generation: 1,
            ports: vec![port(1, "ns/a", 1010, 0), port(2, "ns/b", 35, 0), port(3, "ns/c", 7, 5)],
        });
        board
    }

    #[test]
    fn rows_are_sorted_by_the_rates_of_the_last_interval() {
        let mut board = board();
        assert_eq!(names(&board), ["ns/b", "ns/a", "ns/c"]);
        let (_, rates) = board.rows().remove(0);
        assert_eq!(rates.connections, [30.0]);
        assert_eq!(rates.endpoints[&SocketAddr::from(([10, 0, 0, 1], 80))], [30.0]);
        press(&mut board, &[KeyCode::Char('r')]);
        assert_eq!(names(&board)[0], "ns/c");
        press(&mut board, &[KeyCode::Char('n')]);
        assert_eq!(names(&board), ["ns/a", "ns/b", "ns/c"]);
    }

    #[test]
    fn a_service_that_is_new_or_begins_anew_has_no_negative_rate() {
        let mut board = board();
        let at = board.sample.as_ref().unwrap().at + SECOND;
        board.update(Sample {
            at,
            generation: 2,
            ports: vec![port(1, "ns/a", 3, 0), port(4, "ns/d", 99, 0)],
        });
        let rates: Vec<_> = board.rows().iter().map(|(_, it)| Rates::now(&it.connections)).collect();
        assert_eq!(rates, [0.0, 0.0]);
        assert_eq!(board.rates.len(), 1, "those that are gone take no memory");
    }

    #[test]
    fn a_filter_is_typed_and_cleared() {
        let mut board = board();
        type_in(&mut board, "/s/bq");
        assert_eq!(names(&board), [""; 0]);
        press(&mut board, &[KeyCode::Backspace, KeyCode::Enter]);
        assert_eq!(names(&board), ["ns/b"]);
        assert_eq!(press(&mut board, &[KeyCode::Esc]), Outcome::Stay);
        assert_eq!(names(&board).len(), 3);
        assert_eq!(press(&mut board, &[KeyCode::Esc]), Outcome::Quit);
    }

    #[test]
    fn the_selected_service_stays_selected_wherever_it_moves() {
        let mut board = board();
        press(&mut board, &[KeyCode::Down, KeyCode::Down]);
        assert_eq!(position(&board), Some(1));
        press(&mut board, &[KeyCode::Char('n')]);
        assert_eq!(position(&board), Some(0));
        press(&mut board, &[KeyCode::PageDown]);
        assert_eq!(position(&board), Some(2));
        press(&mut board, &[KeyCode::Enter]);
        assert_eq!(&*board.opened().unwrap().0.name.service, "ns/c");
        let at = board.sample.as_ref().unwrap().at + SECOND;
        board.update(Sample { at, generation: 2, ports: vec![port(1, "ns/a", 3, 0)] });
        assert!(board.opened().is_none(), "it is gone");
        assert_eq!(press(&mut board, &[KeyCode::Esc]), Outcome::Stay);
        assert_eq!(press(&mut board, &[KeyCode::Char('q')]), Outcome::Quit);
    }

    #[test]
    fn a_plot_has_a_bounded_number_of_rates() {
        let mut history = VecDeque::new();
        (0..100).for_each(|it| push(&mut history, f64::from(it)));
        assert_eq!((history.len(), history.back()), (HISTORY, Some(&99.0)));
    }
}
