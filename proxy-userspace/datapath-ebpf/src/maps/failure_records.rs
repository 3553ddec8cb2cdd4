//! The records of failing endpoints: read to be reported, and deleted when they say nothing any more.
//!
//! Invariant: the programs decide without this process; while there is no record, looking for some costs one load.

use std::{collections::HashMap, time::Duration};

use aya::{
    Ebpf,
    maps::{Array, MapData},
};
use datapath::Ejections;
use proxy_common::{
    counters::CounterIndex,
    health::{Client, FailureKey, FailureRecord, HAS_RECORDS, REFUSALS, TIMEOUTS, client, key_parts},
};

use crate::{
    error::Error,
    host::{clock, raw_bpf},
    maps::{map_spec, record_map::RecordMap},
    tables::layout::EjectingClients,
};

const HEALTH: &str = "HEALTH";

/// How long a record is kept after the last failure and the end of the ejection: meanwhile some connection tries the
/// endpoint, or there are none.
const TIME_TO_TRY: Duration = Duration::from_secs(60);

pub(crate) struct FailureRecords {
    records: RecordMap<FailureKey, FailureRecord>,
    words: Array<MapData, u64>,
    /// The network namespace of this process; unknown before Linux 5.14.
    node: Option<Client>,
}

impl FailureRecords {
    pub(crate) fn take(ebpf: &mut Ebpf) -> Result<Self, Error> {
        let records = RecordMap::take(ebpf, "FAILURES")?;
        let node = raw_bpf::netns_cookie().ok().map(client);
        Ok(Self { records, words: map_spec::take(ebpf, HEALTH)?, node })
    }

    /// Who avoids each endpoint, by the counter of its connections. Deletes old records.
    pub(crate) fn read(&mut self) -> Result<HashMap<CounterIndex, EjectingClients>, Error> {
        let mut avoiders = HashMap::<_, EjectingClients>::new();
        if self.word(HAS_RECORDS)? == 0 {
            return Ok(avoiders);
        }
        let now = clock::now()?;
        let is_old = |it: &FailureRecord| {
            now.saturating_sub(Duration::from_nanos(it.last.max(it.until))) > TIME_TO_TRY
        };
        let records = self.delete(|_, it| is_old(it))?;
        if records.is_empty() {
            self.set_word(HAS_RECORDS, 0)?;
            // A program may have added one before that.
            if !self.records.read()?.is_empty() {
                self.set_word(HAS_RECORDS, 1)?;
            }
        }
        for (key, _) in records.iter().filter(|(_, it)| it.until != 0) {
            let (client, endpoint) = key_parts(*key);
            let of_endpoint = avoiders.entry(endpoint).or_default();
            of_endpoint.clients += 1;
            of_endpoint.has_node |= Some(client) == self.node;
        }
        Ok(avoiders)
    }

    pub(crate) fn ejected(&self) -> Result<Vec<(FailureKey, FailureRecord)>, Error> {
        if self.word(HAS_RECORDS)? == 0 {
            return Ok(Vec::new());
        }
        Ok(self.records.read()?.into_iter().filter(|(_, it)| it.until != 0).collect())
    }

    /// Replaces a record, unless a connection has succeeded meanwhile.
    pub(crate) fn replace(&self, key: FailureKey, record: &FailureRecord) -> Result<(), Error> {
        self.records.replace(&key, record)
    }

    /// Deletes the records of endpoints that have changed.
    pub(crate) fn forget(&mut self, mut endpoints: Vec<CounterIndex>) -> Result<(), Error> {
        if !endpoints.is_empty() && self.word(HAS_RECORDS)? != 0 {
            endpoints.sort_unstable();
            self.delete(|endpoint, _| endpoints.binary_search(&endpoint).is_ok())?;
        }
        Ok(())
    }

    pub(crate) fn ejections(&self) -> Result<Ejections, Error> {
        Ok(Ejections { timeouts: self.word(TIMEOUTS)?, refusals: self.word(REFUSALS)? })
    }

    /// Deletes some records, and returns the others.
    fn delete(
        &self,
        is_deleted: impl Fn(CounterIndex, &FailureRecord) -> bool,
    ) -> Result<Vec<(FailureKey, FailureRecord)>, Error> {
        let records = self.records.read()?.into_iter();
        let (deleted, left): (Vec<_>, _) = records.partition(|(key, it)| is_deleted(key_parts(*key).1, it));
        for (key, _) in deleted {
            self.records.delete(&key)?;
        }
        Ok(left)
    }

    fn word(&self, index: u32) -> Result<u64, Error> {
        self.words.get(&index, 0).map_err(Error::map(HEALTH))
    }

    fn set_word(&mut self, index: u32, value: u64) -> Result<(), Error> {
        self.words.set(index, value, 0).map_err(Error::map(HEALTH))
    }
}
