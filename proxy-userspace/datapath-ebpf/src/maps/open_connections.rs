//! Recounts the open connections that programs count for the Services that choose by them.
//!
//! Invariant: a connection is counted as open as long as the slot of its socket says so. The counts drift where a program was
//! not run at the end of one, or a slot was lost to an upgrade; a recount puts that right.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use proxy_common::{counters::CounterIndex, sock_nat::NatSlot};

use crate::{
    error::Error,
    maps::{counter_maps::CounterChunks, pins::Pins, record_map::RecordMap},
};

/// The time between recounts. Each reads all slots, which takes milliseconds.
const INTERVAL: Duration = Duration::from_secs(60);

/// Compares the counts with the slots, every minute.
pub(crate) struct Recount {
    slots: RecordMap<u32, NatSlot>,
    next: Instant,
    /// The differences that the last recount found.
    drift: HashMap<CounterIndex, i64>,
}

impl Recount {
    pub(crate) fn open(pins: &Pins) -> Result<Self, Error> {
        let slots = RecordMap::open(&pins.sock_nat_map("slots"))?;
        Ok(Self { slots, next: Instant::now(), drift: HashMap::new() })
    }

    /// Corrects the numbers of open connections, if a recount is due.
    pub(crate) fn correct(&mut self, chunks: &mut CounterChunks) -> Result<(), Error> {
        if Instant::now() < self.next {
            return Ok(());
        }
        let counted = chunks.open_connections()?;
        self.next = Instant::now() + INTERVAL;
        if counted.iter().all(|it| *it == 0) {
            return Ok(());
        }
        let slots = self.slots.read()?;
        let corrections = compare(&mut self.drift, &counted, slots.iter().map(|(_, it)| it));
        chunks.correct_open_connections(&corrections)
    }
}

/// What has to be added to each number of open connections; `counted` are those numbers, by counter. Connections begin and end
/// meanwhile: a difference is corrected when two recounts in a row agree on it. `drift` are those that are not confirmed yet.
fn compare<'a>(
    drift: &mut HashMap<CounterIndex, i64>,
    counted: &[i64],
    slots: impl Iterator<Item = &'a NatSlot>,
) -> Vec<(CounterIndex, i64)> {
    let mut open: HashMap<_, _> =
        (0..).zip(counted.iter().map(|it| -it)).filter(|(_, it)| *it != 0).collect();
    for it in slots.filter(|it| it.claims != 0 && it.watch.is_counted()) {
        *open.entry(it.watch.backend()).or_default() += 1;
    }
    open.retain(|_, it| *it != 0);
    let corrections = open.extract_if(|counter, it| drift.get(counter) == Some(it)).collect();
    *drift = open;
    corrections
}

#[cfg(test)]
mod tests {
    use proxy_common::{health::Watch, tables::HealthPolicy};

    use super::*;

    fn slot(backend: CounterIndex, is_counted: bool, claims: u32) -> NatSlot {
        NatSlot {
            claims,
            watch: Watch::new(backend, HealthPolicy::default(), is_counted),
            ..NatSlot::default()
        }
    }

    #[test]
    fn a_difference_that_lasts_is_corrected_once() {
        let mut drift = HashMap::new();
        // Not counted as open, and free.
        let slots =
            [slot(0, true, 1), slot(0, true, 1), slot(1, true, 1), slot(2, false, 1), slot(3, true, 0)];
        let mut compare = |counted: &[i64]| {
            let mut corrections = compare(&mut drift, counted, slots.iter());
            corrections.sort_unstable();
            corrections
        };
        assert_eq!(compare(&[5, 1, 1, -1]), []);
        // A connection to 0 was closed while it was counted, and is gone the next time.
        assert_eq!(compare(&[4, 1, 1, -1]), [(2, -1), (3, 1)]);
        assert_eq!(compare(&[4, 1, 0, 0]), [(0, -2)]);
        assert_eq!(compare(&[2, 1, 0, 0]), []);
        assert_eq!(compare(&[2, 1, 0, 0]), []);
    }
}
