//! The tests to run on a kernel, and the events of a run: JSON between the host and a virtual machine.

use std::collections::{BTreeMap, BTreeSet};

use build_tools::test_suite::{Outcome, Test};
use serde::{Deserialize, Serialize};

/// This machine's own kernel, without a virtual machine.
pub(crate) const HOST: &str = "own";

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TestPlan {
    pub(crate) tests: Vec<Test>,
    /// Names to look up in the kernel's BTF.
    pub(crate) features: BTreeSet<String>,
    pub(crate) environment: BTreeMap<String, String>,
    /// The timeout of a test, in seconds.
    pub(crate) timeout: u64,
}

/// The name of a test without its suite and modules, as in tests/KERNELS.md.
pub(crate) fn short_name(test: &str) -> &str {
    test.rsplit("::").next().unwrap_or(test)
}

/// The events of a run, in this order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// The kernel has booted: its release, and which of the features it has.
    Ready {
        release: String,
        features: BTreeSet<String>,
    },
    Started {
        test: String,
    },
    Ended {
        test: String,
        outcome: Outcome,
        seconds: f64,
    },
    Done,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line() {
        let event =
            Event::Ended { test: "a::b".into(), outcome: Outcome::Failed("two\nlines".into()), seconds: 1.5 };
        let line = serde_json::to_string(&event).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
    }
}
