//! Runs the tests of a plan, each in a process of its own, and reports events.
//! Invariant: it does the same in a virtual machine and on the host's kernel.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use build_tools::{SKIPPED_TESTS_FILE, command::wait_or_kill};

use crate::plan::{Event, Outcome, Test, TestPlan};

/// How much of a failed test's output is reported, from its end.
const MAX_OUTPUT: usize = 32 << 10;

/// Runs a plan that is in a file, and writes a line of JSON per event to standard output.
pub(crate) fn run_file(plan: &Path) -> Result<()> {
    let text = fs::read(plan).with_context(|| format!("cannot read {}", plan.display()))?;
    let plan: TestPlan = serde_json::from_slice(&text).context("cannot parse the plan")?;
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
        on_event(Event::Started { test: test.title() })?;
        let begin = Instant::now();
        let outcome = run_test(plan, test)?;
        on_event(Event::Ended { test: test.title(), outcome, seconds: begin.elapsed().as_secs_f64() })?;
    }
    on_event(Event::Done)
}

fn run_test(plan: &TestPlan, test: &Test) -> Result<Outcome> {
    let folder = tempfile::tempdir().context("cannot create a folder")?;
    let (output, skipped) = (folder.path().join("output"), folder.path().join("skipped"));
    let file = File::create(&output)?;
    let mut child = Command::new(&test.binary)
        .args(["--exact", &test.name, "--nocapture", "--test-threads=1"])
        .envs(&plan.environment)
        .env(SKIPPED_TESTS_FILE, &skipped)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()
        .with_context(|| format!("cannot start {}", test.binary.display()))?;
    let status = wait_or_kill(&mut child, Duration::from_secs(plan.timeout))?;
    let output = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
    let skipped = fs::read_to_string(&skipped).unwrap_or_default();
    Ok(outcome(status, plan.timeout, &output, &skipped))
}

fn outcome(status: Option<ExitStatus>, timeout: u64, output: &str, skipped: &str) -> Outcome {
    let failed = |reason: &str| Outcome::Failed(format!("{}\n{reason}", tail(output)));
    match status {
        None => failed(&format!("it did not end within {timeout} s")),
        Some(status) if !status.success() => failed(&format!("it ended with {status}")),
        // libtest succeeds without a test of this name.
        Some(_) if !output.contains("test result: ok. 1 passed") => failed("it ran no test of this name"),
        Some(_) => match skipped.lines().next() {
            // `skipped: NAME: REASON`
            Some(line) => Outcome::Skipped(line.splitn(3, ": ").last().unwrap_or(line).to_owned()),
            None => Outcome::Passed,
        },
    }
}

fn tail(output: &str) -> &str {
    output[output.ceil_char_boundary(output.len().saturating_sub(MAX_OUTPUT))..].trim()
}

/// Whether the strings of the kernel's BTF contain this name: a type, a function, or a value of an enum.
fn has_name(btf: &[u8], name: &str) -> bool {
    let wanted = [b"\0", name.as_bytes(), b"\0"].concat();
    btf.windows(wanted.len()).any(|it| it == wanted)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    fn of(code: i32, output: &str, skipped: &str) -> Outcome {
        outcome(Some(ExitStatus::from_raw(code << 8)), 60, output, skipped)
    }

    #[test]
    fn a_test_passes_only_if_it_ran() {
        let ok = "running 1 test\n\ntest result: ok. 1 passed; 0 failed";
        assert_eq!(of(0, ok, ""), Outcome::Passed);
        assert_eq!(
            of(0, ok, "skipped: a_name: no SCTP: load sctp\n"),
            Outcome::Skipped("no SCTP: load sctp".to_owned())
        );
        for (code, output) in
            [(101, "panicked"), (101, ok), (0, "test result: ok. 0 passed; 0 failed"), (0, "")]
        {
            assert!(matches!(of(code, output, ""), Outcome::Failed(_)), "{code} {output}");
        }
        assert!(matches!(outcome(None, 60, ok, ""), Outcome::Failed(it) if it.contains("60 s")));
    }

    #[test]
    fn a_feature_is_a_whole_name_in_the_kernels_btf() {
        let btf = b"\x9f\xeb\x01\0\0BPF_FUNC_set_retval\0BPF_MAP_UPDATE_BATCH_2\0";
        assert!(has_name(btf, "BPF_FUNC_set_retval"));
        assert!(!has_name(btf, "BPF_MAP_UPDATE_BATCH"));
        assert!(!has_name(b"", "x"));
    }
}
