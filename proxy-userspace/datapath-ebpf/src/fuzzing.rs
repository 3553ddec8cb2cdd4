//! What the fuzz targets call: pinned maps with arbitrary contents, and any history of states with maps that fail.

use std::collections::BTreeSet;

use model::state::NodeState;
use proxy_common::{
    counters::{COUNTERS_PER_CHUNK, COUNTERS_PER_PORT, NO_COUNTER},
    health::{FailureKey, FailureRecord, key_parts},
    trace::Event,
};

use crate::{
    fake_maps::FakeMaps,
    observe::{active_frontends::rows, dump},
    programs::trace::TraceEvent,
    tables::{
        counter_alloc::{CounterAllocator, CounterOwner},
        double_buffer::DoubleBuffer,
        node_addresses::NodeAddresses,
        store::Table,
    },
};

/// How many owners get counters from what an earlier process has left.
const OWNERS: u64 = 40;

/// The contents of a generation's maps: each entry is described, for each frontend at most once.
///
/// The bytes are divided among the tables, in parts of the lengths that their first bytes say.
pub fn generation(bytes: &[u8]) {
    let (lengths, mut rest) = bytes.split_at(bytes.len().min(Table::COUNT));
    let mut tables = Table::ALL.map(|_| (Vec::new(), Vec::new()));
    for (table, length) in Table::ALL.into_iter().zip(lengths) {
        let size = table.entry();
        let count = usize::from(*length).min(rest.len() / (size.key + size.value));
        let (keys, values) = rest.split_at(count * size.key);
        let (values, after) = values.split_at(count * size.value);
        tables[table.index()] = (keys.to_vec(), values.to_vec());
        rest = after;
    }
    let entries: usize = Table::ALL.iter().map(|it| tables[it.index()].0.len() / it.entry().key).sum();
    let lines = dump::lines(|it| tables[it.index()].clone());
    assert!(lines.is_sorted() && lines.len() <= entries * (entries + 1), "a line per frontend and entry");
    for (key, _) in rows::<FailureKey, FailureRecord>(&(bytes.to_vec(), bytes.to_vec())) {
        let _ = key_parts(key);
    }
}

/// An event that a program reports.
pub fn trace(bytes: &[u8]) {
    for event in bytes.chunks_exact(size_of::<Event>()) {
        let event = TraceEvent::from(bytemuck::pod_read_unaligned::<Event>(event));
        assert!(event.process.chars().count() <= 16);
    }
}

/// The owners of counters that an earlier process has left: no counter gets a second one.
pub fn counters(bytes: &[u8]) {
    // Few owners, so that some are there twice, and are asked for.
    let mut owners: Vec<_> = bytes.iter().map(|it| u64::from(*it) % OWNERS).collect();
    owners.resize(owners.len().next_multiple_of(COUNTERS_PER_CHUNK), 0);
    let mut counters = CounterAllocator::restore(&owners);
    for _ in 0..3 {
        let mut taken = BTreeSet::new();
        for owner in (1..OWNERS).map(CounterOwner) {
            let is_port = owner.0 % 3 == 0;
            let first = if is_port { counters.acquire_port(owner) } else { counters.acquire_backend(owner) };
            let count = if is_port { COUNTERS_PER_PORT } else { 1 };
            assert_eq!(first % count, 0, "the counters of a port lie in one chunk");
            for it in first..first.saturating_add(count) {
                assert!(first == NO_COUNTER || taken.insert(it), "counter {it} has one owner");
            }
            assert_eq!(counters.counter_of(owner), first);
        }
        (1..OWNERS).step_by(2).map(CounterOwner).for_each(|it| counters.release(it));
        (2..OWNERS).step_by(2).map(CounterOwner).for_each(|it| counters.release(it));
        counters.reclaim(|it| it % 7 == 0);
        counters.flushed();
        let removed = counters.take_removed();
        assert!(removed.len() <= owners.len() + taken.len());
    }
}

/// A history of states, with maps that fail: what is active is always one of them, and means what it means without a history.
pub fn history<'a>(states: impl IntoIterator<Item = &'a NodeState>, seed: u32, fails_one_in: u32) {
    let mut maps = FakeMaps::new(seed);
    maps.fails_one_in = fails_one_in;
    let mut buffer = DoubleBuffer::new(maps).expect("these maps can be read");
    let mut active = Vec::new();
    for (n, state) in states.into_iter().enumerate() {
        let expected = described(state);
        match buffer.apply(state, &NodeAddresses::default()) {
            Ok(_) => active = expected,
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        assert_eq!(lines(&buffer), active);
        let _ = buffer.finish_generation().and_then(|()| buffer.reclaim_counters());
        if (n + 1).is_multiple_of(4) {
            // As the next process finds them.
            buffer = DoubleBuffer::new(buffer.store).expect("these maps can be read");
            assert_eq!(lines(&buffer), active);
        }
    }
}

/// What a new process with new maps makes of a state.
fn described(state: &NodeState) -> Vec<String> {
    let mut buffer = DoubleBuffer::new(FakeMaps::new(0)).expect("these maps can be read");
    buffer.apply(state, &NodeAddresses::default()).expect("these maps do not fail");
    lines(&buffer)
}

fn lines(buffer: &DoubleBuffer<FakeMaps>) -> Vec<String> {
    dump::lines(|it| buffer.store.entries(it))
}
