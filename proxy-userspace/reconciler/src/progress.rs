//! Which state each half of the datapath has, and which one is active in both.
//!
//! Invariant: a state is reported as active once both halves have it or a newer one.

use std::collections::BTreeSet;

use datapath::ApplyReport;

use crate::worker::Applied;

#[derive(Debug)]
pub(crate) struct Progress {
    /// What each half has, if anything; `None` for a half that is off.
    sockets: Option<Option<Applied>>,
    packets: Option<Option<Applied>>,
    /// The last turn that was reported.
    reported: u64,
}

impl Progress {
    /// Neither half has a state yet.
    pub(crate) fn new(has_sockets: bool, has_packets: bool) -> Self {
        Self { sockets: has_sockets.then_some(None), packets: has_packets.then_some(None), reported: 0 }
    }

    /// The socket path has a state; returns what to report.
    pub(crate) fn sockets_have(&mut self, applied: Applied) -> Option<Applied> {
        replace(self.sockets.as_mut()?, applied);
        self.both().filter(|it| it.desired.turn > self.reported).map(|it| self.take(it))
    }

    /// The packet path has a state, or the same one after a retry; returns what to report.
    pub(crate) fn packets_have(&mut self, applied: Applied) -> Option<Applied> {
        let turn = applied.desired.turn;
        replace(self.packets.as_mut()?, applied);
        self.both().filter(|it| it.desired.turn >= turn).map(|it| self.take(it))
    }

    /// The newest state that both halves have, or the only one.
    fn both(&self) -> Option<Applied> {
        let (sockets, packets) = match (&self.sockets, &self.packets) {
            (Some(sockets), Some(packets)) => (sockets.as_ref()?, packets.as_ref()?),
            (Some(one), None) | (None, Some(one)) => return one.clone(),
            (None, None) => return None,
        };
        let older = if sockets.desired.turn < packets.desired.turn { sockets } else { packets };
        let (one, other) = (&sockets.report, &packets.report);
        let rejected: BTreeSet<_> = one.rejected.iter().chain(&other.rejected).cloned().collect();
        let report = ApplyReport {
            changed_services: one.changed_services.max(other.changed_services),
            services: one.services.max(other.services),
            entries: one.entries + other.entries,
            flipped: one.flipped || other.flipped,
            is_full: one.is_full || other.is_full,
            tables: one.tables.iter().chain(&other.tables).copied().collect(),
            rejected: rejected.into_iter().collect(),
        };
        Some(Applied { report, ..older.clone() })
    }

    fn take(&mut self, applied: Applied) -> Applied {
        self.reported = applied.desired.turn;
        for Applied { report, .. } in [&mut self.sockets, &mut self.packets].into_iter().flatten().flatten() {
            *report = ApplyReport {
                changed_services: 0,
                entries: 0,
                flipped: false,
                is_full: false,
                ..report.clone()
            };
        }
        applied
    }
}

/// Replaces the state of a half; what an unreported one did counts for the new one.
fn replace(half: &mut Option<Applied>, mut applied: Applied) {
    if let Some(before) = half {
        applied.add(&before.report);
    }
    *half = Some(applied);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::Desired;

    fn applied(turn: u64, entries: usize) -> Applied {
        Applied { desired: Desired::of_turn(turn), report: ApplyReport { entries, ..ApplyReport::default() } }
    }

    #[track_caller]
    fn check(reported: Option<Applied>, expect: Option<(u64, usize)>) {
        assert_eq!(reported.map(|it| (it.desired.turn, it.report.entries)), expect);
    }

    #[test]
    fn a_state_is_active_once_both_halves_have_it_and_reported_again_after_a_retry() {
        let mut progress = Progress::new(true, true);
        // Sockets that are ahead do not hide what is active in both.
        for turn in 1..=3 {
            check(progress.sockets_have(applied(turn, 1)), None);
        }
        check(progress.packets_have(applied(1, 5)), Some((1, 8)));
        check(progress.sockets_have(applied(4, 1)), None);
        check(progress.packets_have(applied(4, 5)), Some((4, 6)));
        check(progress.packets_have(applied(5, 5)), None);
        check(progress.sockets_have(applied(5, 10)), Some((5, 15)));
        check(progress.packets_have(applied(5, 5)), Some((5, 5)));
    }

    #[test]
    fn a_half_that_is_off_is_not_waited_for() {
        check(Progress::new(true, false).sockets_have(applied(1, 1)), Some((1, 1)));
        check(Progress::new(false, true).packets_have(applied(1, 1)), Some((1, 1)));
    }
}
