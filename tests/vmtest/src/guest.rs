//! Runs the tests of a plan, each in a process of its own, and reports events.
//! Invariant: it does the same in a virtual machine and on the host's kernel.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result};
use build_tools::{read, test_suite::run_test};

use crate::plan::{Event, TestPlan};

/// Runs a plan that is in a file, and writes a line of JSON per event to standard output.
pub(crate) fn run_file(plan: &Path) -> Result<()> {
    let plan: TestPlan = serde_json::from_slice(&read(plan)?).context("cannot parse the plan")?;
    run(&plan, |event| {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&event)?)?;
        Ok(out.flush()?)
    })
}

/// Runs a plan; fails if a test cannot be started at all, or `on_event` fails.
pub(crate) fn run(plan: &TestPlan, mut on_event: impl FnMut(Event) -> Result<()>) -> Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
    let btf = fs::read("/sys/kernel/btf/vmlinux").unwrap_or_default();
    let features = plan.features.iter().filter(|it| has_name(&btf, it)).cloned().collect();
    on_event(Event::Ready { release, features })?;
    for test in &plan.tests {
        on_event(Event::Started { test: test.name.clone() })?;
        let (outcome, took) = run_test(test, &plan.environment, Duration::from_secs(plan.timeout))?;
        on_event(Event::Ended { test: test.name.clone(), outcome, seconds: took.as_secs_f64() })?;
    }
    on_event(Event::Done)
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
    fn a_feature_is_a_whole_name_in_the_kernels_btf() {
        let btf = b"\x9f\xeb\x01\0\0BPF_FUNC_set_retval\0BPF_MAP_UPDATE_BATCH_2\0";
        assert!(has_name(btf, "BPF_FUNC_set_retval"));
        assert!(!has_name(btf, "BPF_MAP_UPDATE_BATCH"));
        assert!(!has_name(b"", "x"));
    }
}
