//! The tests to run on a kernel, each in a process of its own, and the events of a run: JSON between the host and a virtual machine.
//! Invariant: a run does the same in a virtual machine and on the host's kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Write as _},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result};
use build_tools::{
    read,
    test_suite::{Outcome, Test, run_test},
};
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
    Ready { release: String, features: BTreeSet<String> },
    /// A test has started.
    Started { test: String },
    /// A test has ended.
    Ended { test: String, outcome: Outcome, seconds: f64 },
    /// All tests have ended.
    Done,
}

impl TestPlan {
    /// Runs a plan that is in a file, and writes a line of JSON per event to standard output.
    pub(crate) fn run_file(file: &Path) -> Result<()> {
        let plan: Self = serde_json::from_slice(&read(file)?).context("cannot parse the plan")?;
        plan.run(|event| {
            let mut out = io::stdout().lock();
            writeln!(out, "{}", serde_json::to_string(&event)?)?;
            Ok(out.flush()?)
        })
    }

    /// Runs the tests; fails if one cannot be started at all, or `on_event` fails.
    pub(crate) fn run(&self, mut on_event: impl FnMut(Event) -> Result<()>) -> Result<()> {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
        let btf = fs::read("/sys/kernel/btf/vmlinux").unwrap_or_default();
        let features = self.features.iter().filter(|it| has_name(&btf, it)).cloned().collect();
        on_event(Event::Ready { release, features })?;
        for test in &self.tests {
            on_event(Event::Started { test: test.name.clone() })?;
            let (outcome, took) = run_test(test, &self.environment, Duration::from_secs(self.timeout))?;
            on_event(Event::Ended { test: test.name.clone(), outcome, seconds: took.as_secs_f64() })?;
        }
        on_event(Event::Done)
    }
}

/// Whether the strings of the kernel's BTF contain this name: a type, a function, or a value of an enum.
fn has_name(btf: &[u8], name: &str) -> bool {
    let wanted = [b"\0", name.as_bytes(), b"\0"].concat();
    btf.windows(wanted.len()).any(|it| it == wanted)
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

    #[test]
    fn a_feature_is_a_whole_name_in_the_kernels_btf() {
        let btf = b"\x9f\xeb\x01\0\0BPF_FUNC_set_retval\0BPF_MAP_UPDATE_BATCH_2\0";
        assert!(has_name(btf, "BPF_FUNC_set_retval"));
        assert!(!has_name(btf, "BPF_MAP_UPDATE_BATCH"));
        assert!(!has_name(b"", "x"));
    }
}
