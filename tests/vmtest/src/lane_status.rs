//! The progress of each lane, in one line.

use std::collections::BTreeMap;

use build_tools::{command::status, progress::ProgressLine};

use build_tools::test_suite::Outcome;

use crate::plan::Event;

/// The current test of each lane, and how many have ended.
#[derive(Default)]
pub(crate) struct LaneStatus {
    lanes: BTreeMap<usize, (String, usize)>,
    progress: ProgressLine,
}

impl LaneStatus {
    pub(crate) fn on_event(&mut self, number: usize, kernel: &str, count: usize, event: &Event) {
        let lane = self.lanes.entry(number).or_default();
        match event {
            Event::Ready { release, .. } => {
                self.progress.clear();
                status("Booted", release);
                kernel.clone_into(&mut lane.0);
            }
            Event::Started { test } => lane.0 = format!("{kernel}: {} of {count}, {test}", lane.1 + 1),
            Event::Ended { test, outcome, .. } => {
                lane.1 += 1;
                if matches!(outcome, Outcome::Failed(_)) {
                    self.progress.clear();
                    status("FAILED", &format!("{test} on {kernel}"));
                }
            }
            Event::Done => {}
        }
    }

    pub(crate) fn show(&mut self) {
        let lines: Vec<_> = self.lanes.values().map(|it| it.0.as_str()).filter(|it| !it.is_empty()).collect();
        if !lines.is_empty() {
            self.progress.show(&format!("     Testing {}", lines.join(" | ")));
        }
    }

    pub(crate) fn remove(&mut self, number: usize) {
        self.lanes.remove(&number);
    }
}
