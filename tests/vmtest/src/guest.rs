//! Runs the tests one by one, each in a process of its own, and tells what became of them.
//! The one rule: the same in a virtual machine and on the machine's own kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

/// How much of what a failed test said is passed on, from its end.
const SAID: usize = 32 << 10;

/// What to run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) tests: Vec<Test>,
    /// Names to look up in the kernel's BTF.
    pub(crate) features: BTreeSet<String>,
    pub(crate) environment: BTreeMap<String, String>,
    /// How long one test may take, in seconds.
    pub(crate) limit: u64,
}

/// A test of a test binary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Test {
    pub(crate) binary: PathBuf,
    /// The binary's name in the workspace, such as `sockets`.
    pub(crate) suite: String,
    pub(crate) name: String,
}

impl Test {
    /// Its name in reports.
    pub(crate) fn title(&self) -> String {
        format!("{}::{}", self.suite, self.name)
    }
}

/// What happens, in the order in which it does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// The kernel is up: its release, and which of the features it has.
    Ready { release: String, features: BTreeSet<String> },
    /// A test begins.
    Started { test: String },
    /// A test has ended.
    Ended { test: String, outcome: Outcome, seconds: f64 },
    /// All have.
    Done,
}

/// What became of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Passed,
    /// It says that this machine lacks something.
    Skipped(String),
    /// What it said.
    Failed(String),
}

/// Runs a plan that lies in a file, and writes a line of JSON per event to standard output.
///
/// # Errors
///
/// If the plan cannot be read, or nobody reads the events.
pub(crate) fn guest(plan: &Path) -> Result<()> {
    let text = fs::read(plan).with_context(|| format!("cannot read {}", plan.display()))?;
    let plan: Plan = serde_json::from_slice(&text).context("this is no plan")?;
    perform(&plan, |event| {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&event)?)?;
        Ok(out.flush()?)
    })
}

/// Runs a plan.
///
/// # Errors
///
/// If a test cannot be started at all, or `tell` fails.
pub(crate) fn perform(plan: &Plan, mut tell: impl FnMut(Event) -> Result<()>) -> Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
    let btf = fs::read("/sys/kernel/btf/vmlinux").unwrap_or_default();
    let features = plan.features.iter().filter(|it| is_named(&btf, it)).cloned().collect();
    tell(Event::Ready { release, features })?;
    for test in &plan.tests {
        tell(Event::Started { test: test.title() })?;
        let begin = Instant::now();
        let outcome = run(plan, test)?;
        tell(Event::Ended { test: test.title(), outcome, seconds: begin.elapsed().as_secs_f64() })?;
    }
    tell(Event::Done)
}

fn run(plan: &Plan, test: &Test) -> Result<Outcome> {
    let folder = env::temp_dir().join(format!("kpe-test-{}", std::process::id()));
    let (said, skipped) = (folder.join("said"), folder.join("skipped"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let out = File::create(&said)?;
    let mut child = Command::new(&test.binary)
        .args(["--exact", &test.name, "--nocapture", "--test-threads=1"])
        .envs(&plan.environment)
        .env(::tests::sandbox::SKIPPED_TESTS_FILE, &skipped)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .spawn()
        .with_context(|| format!("cannot start {}", test.binary.display()))?;
    let status = wait(&mut child, Duration::from_secs(plan.limit))?;
    let said = String::from_utf8_lossy(&fs::read(&said)?).into_owned();
    let skipped = fs::read_to_string(&skipped).unwrap_or_default();
    fs::remove_dir_all(&folder)?;
    Ok(judge(status, plan.limit, &said, &skipped))
}

/// `None` if it did not end in time and was killed.
fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begin.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn judge(status: Option<ExitStatus>, limit: u64, said: &str, skipped: &str) -> Outcome {
    let failed = |why: &str| Outcome::Failed(format!("{}\n{why}", tail(said)));
    match status {
        None => failed(&format!("it did not end within {limit} s")),
        Some(status) if !status.success() => failed(&format!("it ended with {status}")),
        // A name that the binary does not know is no failure to libtest.
        Some(_) if !said.contains("test result: ok. 1 passed") => failed("it ran no test of this name"),
        Some(_) => match skipped.lines().next() {
            // `skipped: NAME: REASON`
            Some(line) => Outcome::Skipped(line.splitn(3, ": ").last().unwrap_or(line).to_owned()),
            None => Outcome::Passed,
        },
    }
}

fn tail(said: &str) -> &str {
    let mut begin = said.len().saturating_sub(SAID);
    while !said.is_char_boundary(begin) {
        begin += 1;
    }
    said[begin..].trim()
}

/// Whether the strings of the kernel's BTF hold this name: a type, a function, or a value of an enum.
fn is_named(btf: &[u8], name: &str) -> bool {
    let wanted = [b"\0", name.as_bytes(), b"\0"].concat();
    btf.windows(wanted.len()).any(|it| it == wanted)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    fn of(code: i32, said: &str, skipped: &str) -> Outcome {
        judge(Some(ExitStatus::from_raw(code << 8)), 60, said, skipped)
    }

    #[test]
    fn a_test_passes_only_if_it_ran() {
        let ok = "running 1 test\n\ntest result: ok. 1 passed; 0 failed";
        assert_eq!(of(0, ok, ""), Outcome::Passed);
        assert_eq!(
            of(0, ok, "skipped: a_name: no SCTP: load sctp\n"),
            Outcome::Skipped("no SCTP: load sctp".to_owned())
        );
        for (code, said) in
            [(101, "panicked"), (101, ok), (0, "test result: ok. 0 passed; 0 failed"), (0, "")]
        {
            assert!(matches!(of(code, said, ""), Outcome::Failed(_)), "{code} {said}");
        }
        assert!(matches!(judge(None, 60, ok, ""), Outcome::Failed(it) if it.contains("60 s")));
    }

    #[test]
    fn a_feature_is_a_whole_name_of_the_kernels_btf() {
        let btf = b"\x9f\xeb\x01\0\0BPF_FUNC_set_retval\0BPF_MAP_UPDATE_BATCH_2\0";
        assert!(is_named(btf, "BPF_FUNC_set_retval"));
        assert!(!is_named(btf, "BPF_MAP_UPDATE_BATCH"));
        assert!(!is_named(b"", "x"));
    }

    #[test]
    fn an_event_is_one_line() {
        let event =
            Event::Ended { test: "a::b".into(), outcome: Outcome::Failed("two\nlines".into()), seconds: 1.5 };
        let line = serde_json::to_string(&event).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
    }
}
