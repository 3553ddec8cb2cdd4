//! What the programs know of backends: ejections, open connections, ages.

use proxy_common::{
    choice::BackendStates,
    counters::{AGE_ROW, BackendAge, CounterIndex, OPEN_ROW},
    health::{Client, Watch, ZERO, key},
};

use crate::{atomic, counters, ctx, health, maps::FAILURES, notes::Notes};

pub(crate) struct States {
    pub(crate) notes: Notes,
}

impl BackendStates for States {
    #[inline(always)]
    fn now(&self) -> u64 {
        ctx::now()
    }

    #[inline(always)]
    fn ejected_until(&self, client: Client, backend: CounterIndex) -> u64 {
        // SAFETY: see `health`.
        unsafe { FAILURES.get(key(client, backend)) }.map_or(0, |it| it.until)
    }

    #[inline(always)]
    fn try_again(&self, client: Client, backend: CounterIndex, now: u64) {
        if let Some(record) = FAILURES.get_ptr_mut(key(client, backend)) {
            // SAFETY: see `health`.
            unsafe { &mut *record }.try_again(now);
        }
        self.notes.on_tried();
    }

    #[inline(always)]
    fn load(&self, backend: CounterIndex) -> (u64, BackendAge) {
        let [open, age] = [OPEN_ROW, AGE_ROW].map(|row| match counters::metadata(backend, row) {
            // SAFETY: a row is never freed while its chunk is in the outer map; volatile, as others write to it.
            Some(word) => unsafe { word.read_volatile() },
            None => 0,
        });
        let age = BackendAge::from_bits(age);
        (age.open(open), age)
    }

    #[inline(always)]
    fn zero(&self) -> u32 {
        health::word(ZERO) as u32
    }

    #[inline(always)]
    fn on_avoided(&self) {
        self.notes.on_avoided();
    }
}

/// The socket of a connection begins another one, or none: it is closed or connects elsewhere.
#[inline(always)]
pub(crate) fn replace(before: Watch, now: Watch) {
    // One branch for both.
    if Watch::from_bits(before.bits() | now.bits()).is_counted() {
        count_open(before.bits().into(), now.bits().into());
    }
}

/// Counts open connections. Not inlined, so that the verifier follows its paths once, see [`crate::side`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn count_open(before: u64, now: u64) -> u64 {
    for (bits, difference) in [(before, u64::MAX), (now, 1)] {
        let connection = Watch::from_bits(bits as u32);
        if connection.is_counted()
            && let Some(open) = counters::metadata(connection.backend(), OPEN_ROW)
        {
            atomic::add(open, difference);
        }
    }
    0
}
