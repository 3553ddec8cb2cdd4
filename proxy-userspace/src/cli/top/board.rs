//! What is on the board: rates of two readings, sorted and filtered, and what keys do. Pure.

use std::{cmp::Reverse, collections::BTreeMap, mem, ops::ControlFlow, time::Instant};

use admin::{Rates, rate};
use clap::ValueEnum;
use datapath::{ForwardCounts, PortId};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::sample::{Endpoint, Endpoints, HISTORY, PortSample, Sample};

/// How far a page key moves.
const PAGE: usize = 10;

/// The column that decides the order, the largest value first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum SortBy {
    /// Connections per second
    #[default]
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

#[derive(Default)]
pub(super) struct Board {
    pub(super) sort: SortBy,
    pub(super) filter: String,
    pub(super) is_filtering: bool,
    /// The selected service port, and whether its endpoints are shown.
    selected: Option<PortId>,
    is_opened: bool,
    /// The time and the generation of the last reading.
    read: Option<(Instant, u32)>,
    rows: BTreeMap<PortId, Row>,
    /// Those of the service port whose endpoints are shown.
    endpoints: Option<Endpoints>,
    /// Whether packets to a Service are, or were, forwarded whole.
    pub(super) has_forwarded: bool,
    /// Why the last reading failed; what was read before stays.
    pub(super) failure: Option<String>,
}

/// A service port with its rates.
pub(super) struct Row {
    pub(super) port: PortSample,
    pub(super) rates: Rates<HISTORY>,
}

impl Board {
    pub(super) fn new(sort: SortBy, filter: String) -> Self {
        Self { sort, filter, ..Self::default() }
    }

    pub(super) fn update(&mut self, sample: Sample) {
        self.failure = None;
        let seconds = self.read.map_or(1.0, |(at, _)| seconds(at, sample.at));
        self.read = Some((sample.at, sample.generation));
        let mut before = mem::take(&mut self.rows);
        let row = |port: PortSample| {
            let mut rates = Rates::default();
            if let Some(before) = before.remove(&port.id) {
                rates = before.rates;
                rates.add(port.counts, before.port.counts, seconds);
            }
            (port.id, Row { port, rates })
        };
        self.rows = sample.ports.into_iter().map(row).collect();
        let none = ForwardCounts::default();
        self.has_forwarded = self.rows.values().any(|it| it.port.counts.forwarding != none);
    }

    /// Takes a new reading of the endpoints of the opened service port.
    pub(super) fn set_endpoints(&mut self, mut endpoints: Endpoints) {
        if let Some(before) = self.endpoints.take().filter(|it| it.of == endpoints.of) {
            let seconds = seconds(before.at, endpoints.at);
            let mut before: BTreeMap<_, _> = before.all.into_iter().map(|it| (it.address, it)).collect();
            for it in &mut endpoints.all {
                if let Some(before) = before.remove(&it.address) {
                    it.rates = before.rates;
                    it.rates.push(rate(it.connections, before.connections, seconds));
                }
            }
        }
        self.endpoints = Some(endpoints);
    }

    pub(super) fn generation(&self) -> Option<u32> {
        self.read.map(|(_, generation)| generation)
    }

    /// The service port whose endpoints are shown.
    pub(super) fn opened(&self) -> Option<&Row> {
        self.rows.get(&self.selected.filter(|_| self.is_opened)?)
    }

    /// The endpoints of a service port; none until they are read.
    pub(super) fn endpoints_of(&self, port: PortId) -> Option<&[Endpoint]> {
        self.endpoints.as_ref().filter(|it| it.of == port).map(|it| &*it.all)
    }

    /// The service ports that pass the filter, in order.
    pub(super) fn rows(&self) -> Vec<&Row> {
        let is_shown = |it: &&Row| {
            let PortSample { name, address, .. } = &it.port;
            [&*name.service, &*name.port, address].iter().any(|it| it.contains(&self.filter))
        };
        let mut rows: Vec<_> = self.rows.values().filter(is_shown).collect();
        rows.sort_by_cached_key(|Row { port, rates }| {
            let milli = |it: f64| (it * 1e3) as u64;
            let value = match self.sort {
                SortBy::Connections => milli(rates.connections.now()),
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
    pub(super) fn position_in(&self, rows: &[&Row]) -> Option<usize> {
        rows.iter().position(|it| Some(it.port.id) == self.selected)
    }

    /// Acts on a key; breaks with one that quits.
    pub(super) fn press(&mut self, key: KeyEvent) -> ControlFlow<()> {
        if key.kind == KeyEventKind::Release {
            return ControlFlow::Continue(());
        }
        let is_interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            _ if is_interrupt => return ControlFlow::Break(()),
            code if self.is_filtering => self.edit_filter(code),
            KeyCode::Char('q') => return ControlFlow::Break(()),
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
            KeyCode::Esc => return ControlFlow::Break(()),
            _ => {}
        }
        ControlFlow::Continue(())
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
        self.selected = rows.get(position).map(|it| it.port.id);
    }
}

/// The seconds between two readings, never zero.
fn seconds(before: Instant, now: Instant) -> f64 {
    now.saturating_duration_since(before).as_secs_f64().max(1e-3)
}

#[cfg(test)]
pub(super) mod tests {
    use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

    use admin::History;
    use datapath::PortCounts;

    use super::*;
    use crate::cli::status::PortName;

    const SECOND: Duration = Duration::from_secs(1);

    pub(in crate::cli::top) fn port(id: u64, name: &str, connections: u64, refused: u64) -> PortSample {
        PortSample {
            id: PortId(id),
            name: PortName { service: name.into(), port: "http".into() },
            address: format!("10.96.0.{id}:80/TCP"),
            endpoint_count: 1,
            counts: PortCounts { connections, no_backend: refused, ..PortCounts::default() },
            ejected: BTreeSet::new(),
        }
    }

    fn endpoints(of: u64, at: Instant, connections: u64) -> Endpoints {
        let address = SocketAddr::from(([10, 0, 0, 1], 80));
        Endpoints {
            of: PortId(of),
            at,
            all: vec![Endpoint { address, connections, rates: History::default() }],
        }
    }

    /// Whether the last key quits.
    fn press(board: &mut Board, keys: &[KeyCode]) -> bool {
        keys.iter().map(|it| board.press((*it).into()).is_break()).last().unwrap()
    }

    fn position(board: &Board) -> Option<usize> {
        board.position_in(&board.rows())
    }

    fn names(board: &Board) -> Vec<&str> {
        board.rows().iter().map(|it| &*it.port.name.service).collect()
    }

    /// Takes a reading a second after the last one.
    pub(in crate::cli::top) fn read(board: &mut Board, generation: u32, ports: Vec<PortSample>) {
        let at = board.read.map_or_else(Instant::now, |(at, _)| at + SECOND);
        board.update(Sample { at, generation, ports });
    }

    /// A second in which `a` had 10 connections, `b` 30, and `c` none, but 5 refused ones.
    fn board() -> Board {
        let mut board = Board::new(SortBy::Connections, String::new());
        read(&mut board, 1, vec![port(1, "ns/a", 1000, 0), port(2, "ns/b", 5, 0), port(3, "ns/c", 7, 0)]);
        assert_eq!(names(&board), ["ns/a", "ns/c", "ns/b"], "without rates by the connections so far");
        read(&mut board, 1, vec![port(1, "ns/a", 1010, 0), port(2, "ns/b", 35, 0), port(3, "ns/c", 7, 5)]);
        board
    }

    #[test]
    fn rows_are_sorted_by_the_rates_of_the_last_interval() {
        let mut board = board();
        assert_eq!(names(&board), ["ns/b", "ns/a", "ns/c"]);
        assert_eq!(board.rows()[0].rates.connections.iter().collect::<Vec<_>>(), [30.0]);
        press(&mut board, &[KeyCode::Char('r')]);
        assert_eq!(names(&board)[0], "ns/c");
        press(&mut board, &[KeyCode::Char('n')]);
        assert_eq!(names(&board), ["ns/a", "ns/b", "ns/c"]);
    }

    #[test]
    fn a_service_that_is_new_or_begins_anew_has_no_negative_rate() {
        let mut board = board();
        read(&mut board, 2, vec![port(1, "ns/a", 3, 0), port(4, "ns/d", 99, 0)]);
        let rates: Vec<_> = board.rows().iter().map(|it| it.rates.connections.now()).collect();
        assert_eq!(rates, [0.0, 0.0]);
        assert_eq!(board.rows.len(), 2, "those that are gone take no memory");
    }

    #[test]
    fn a_filter_is_typed_and_cleared() {
        let mut board = board();
        for it in "/s/bq".chars() {
            assert!(!press(&mut board, &[KeyCode::Char(it)]));
        }
        assert_eq!(names(&board), [""; 0]);
        press(&mut board, &[KeyCode::Backspace, KeyCode::Enter]);
        assert_eq!(names(&board), ["ns/b"]);
        assert!(!press(&mut board, &[KeyCode::Esc]));
        assert_eq!(names(&board).len(), 3);
        assert!(press(&mut board, &[KeyCode::Esc]));
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
        assert_eq!(&*board.opened().unwrap().port.name.service, "ns/c");
        read(&mut board, 2, vec![port(1, "ns/a", 3, 0)]);
        assert!(board.opened().is_none(), "it is gone");
        assert!(!press(&mut board, &[KeyCode::Esc]));
        assert!(press(&mut board, &[KeyCode::Char('q')]));
    }

    #[test]
    fn endpoints_have_the_rates_since_they_are_shown() {
        let (mut board, at) = (board(), Instant::now());
        assert!(board.endpoints_of(PortId(2)).is_none());
        for (of, seconds, connections) in [(2, 0, 5), (2, 1, 35), (2, 2, 35)] {
            board.set_endpoints(endpoints(of, at + SECOND * seconds, connections));
        }
        assert_eq!(board.endpoints_of(PortId(2)).unwrap()[0].rates.iter().collect::<Vec<_>>(), [30.0, 0.0]);
        board.set_endpoints(endpoints(1, at + SECOND * 3, 1));
        assert!(board.endpoints_of(PortId(2)).is_none());
        assert_eq!(board.endpoints_of(PortId(1)).unwrap()[0].rates.iter().count(), 0);
    }
}
