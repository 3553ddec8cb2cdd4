//! The tests of the workspace: test binaries are built and listed, and each test runs in a process of its own.
//! Invariant: a test has passed only if its binary says that it ran.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    SKIPPED_TESTS_FILE,
    command::{line, output, wait_or_kill},
};

/// How much of a failed test's output is kept, from its end, in bytes.
const MAX_OUTPUT: usize = 64 << 10;
/// How much of a panic's message is kept, in bytes.
const MAX_PANIC: usize = 4 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Test {
    pub binary: PathBuf,
    /// The folder of its package, in which it runs.
    pub folder: PathBuf,
    /// The package, and for an integration test the file: `brain`, `brain/properties`.
    pub suite: String,
    /// The path of the test in its binary.
    pub name: String,
}

impl Test {
    /// The name in reports.
    pub fn title(&self) -> String {
        format!("{} {}", self.suite, self.name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Passed,
    /// The reason that the test gave: a kernel or a machine lacks something.
    Skipped(String),
    /// The output of the test, and how it ended.
    Failed(String),
}

#[derive(Clone, Debug)]
pub struct TestBinary {
    suite: String,
    folder: PathBuf,
    pub path: PathBuf,
}

impl TestBinary {
    pub fn package(&self) -> &str {
        self.suite.split('/').next().unwrap_or(&self.suite)
    }

    /// The tests, without those that are ignored.
    pub fn tests(&self) -> Result<Vec<Test>> {
        let list =
            |more: &[&str]| output(Command::new(&self.path).args(["--list", "--format", "terse"]).args(more));
        let (all, ignored) = (list(&[])?, list(&["--ignored"])?);
        let names = all.lines().filter(|line| ignored.lines().all(|it| it != *line));
        let tests = names.filter_map(|line| line.strip_suffix(": test")).map(|name| Test {
            binary: self.path.clone(),
            folder: self.folder.clone(),
            suite: self.suite.clone(),
            name: name.to_owned(),
        });
        Ok(tests.collect())
    }
}

/// Runs a `cargo test` that only builds, and returns the binaries. Messages of the compiler go to standard error.
pub fn build_test_binaries(mut cargo_test: Command) -> Result<Vec<TestBinary>> {
    cargo_test.args(["--no-run", "--message-format", "json-render-diagnostics"]).stdout(Stdio::piped());
    let mut child = cargo_test.spawn().with_context(|| format!("cannot start `{}`", line(&cargo_test)))?;
    let messages = BufReader::new(child.stdout.take().context("standard output is piped")?);
    let mut binaries = Vec::new();
    for message in messages.lines() {
        binaries.extend(test_binary(&message?));
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("`{}` failed: {status}", line(&cargo_test));
    }
    Ok(binaries)
}

fn test_binary(message: &str) -> Option<TestBinary> {
    let message: Value = serde_json::from_str(message).ok()?;
    let is_test = message["profile"]["test"].as_bool()?;
    let path = message["executable"].as_str().filter(|_| is_test)?;
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let target = &message["target"];
    // `path+file:///workspace/proto#proxy-contract@0.1.0`, or `path+file:///workspace/tests#0.1.0`.
    let id = message["package_id"].as_str()?;
    let package = match id.rsplit_once('#')?.1.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => folder.file_name()?.to_str()?.to_owned(),
    };
    let is_integration = target["kind"].as_array()?.iter().any(|it| it == "test");
    let suite = if is_integration { format!("{package}/{}", target["name"].as_str()?) } else { package };
    Some(TestBinary { suite, folder: folder.to_owned(), path: path.into() })
}

/// Runs a test to its end, or kills it after `limit`. Also returns how long it ran.
pub fn run_test(
    test: &Test,
    environment: &BTreeMap<String, String>,
    limit: Duration,
) -> Result<(Outcome, Duration)> {
    let scratch = tempfile::tempdir().context("cannot create a folder")?;
    let (output, skipped) = (scratch.path().join("output"), scratch.path().join("skipped"));
    let file = File::create(&output)?;
    let begin = Instant::now();
    let mut command = Command::new(&test.binary);
    if test.folder.exists() {
        command.current_dir(&test.folder).env("CARGO_MANIFEST_DIR", &test.folder);
    }
    let mut child = command
        .args(["--exact", &test.name, "--nocapture", "--test-threads=1"])
        .envs(environment)
        .env(SKIPPED_TESTS_FILE, &skipped)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()
        .with_context(|| format!("cannot start {}", test.binary.display()))?;
    let status = wait_or_kill(&mut child, limit)?;
    let took = begin.elapsed();
    let output = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
    let skipped = fs::read_to_string(&skipped).unwrap_or_default();
    Ok((outcome(status, limit, &output, &skipped), took))
}

fn outcome(status: Option<ExitStatus>, limit: Duration, output: &str, skipped: &str) -> Outcome {
    let failed = |reason: &str| Outcome::Failed(format!("{}\n{reason}", shortened(output)));
    match status {
        None => failed(&format!("it did not end within {} s", limit.as_secs())),
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

/// The end of an output, after the line of the first panic and what follows it: a proxy's log, which is printed after it, may
/// be longer than the end.
fn shortened(output: &str) -> String {
    let (start, end) = output.split_at(output.ceil_char_boundary(output.len().saturating_sub(MAX_OUTPUT)));
    let panic = start.find(" panicked at ").map_or("", |at| {
        let line = start[..at].rfind('\n').map_or(0, |it| it + 1);
        &start[line..start.floor_char_boundary(line + MAX_PANIC)]
    });
    format!("{panic}\n{end}").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn of(code: i32, output: &str, skipped: &str) -> Outcome {
        outcome(Some(ExitStatus::from_raw(code << 8)), LIMIT, output, skipped)
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
        assert!(matches!(outcome(None, LIMIT, ok, ""), Outcome::Failed(it) if it.contains("60 s")));
    }

    #[test]
    fn a_long_output_is_shown_with_its_first_panic() {
        let log = "a line of the log\n".repeat(10_000);
        let output = format!("running\nthread 'x' panicked at a.rs:1:2:\nit failed\n{log}the end");
        let Outcome::Failed(shown) = of(101, &output, "") else { panic!("it failed") };
        assert!(shown.starts_with("thread 'x' panicked at a.rs:1:2:\nit failed\n"), "{}", &shown[..200]);
        assert!(shown.contains("the end\nit ended with") && shown.len() < MAX_OUTPUT + 2 * MAX_PANIC);
    }

    #[test]
    fn a_test_binary_is_named_by_its_package_and_file() {
        let suite = |id: &str, kind: &str, name: &str, is_test: bool| {
            let message = serde_json::json!({
                "package_id": id, "manifest_path": "/w/brain/Cargo.toml", "executable": "/t/x-1",
                "target": {"kind": [kind], "name": name}, "profile": {"test": is_test},
            });
            test_binary(&message.to_string()).map(|it| it.suite)
        };
        assert_eq!(suite("path+file:///w/brain#0.1.0", "lib", "brain", true).as_deref(), Some("brain"));
        assert_eq!(
            suite("path+file:///w/p#brain@0.1.0", "test", "laws", true).as_deref(),
            Some("brain/laws")
        );
        assert_eq!(suite("path+file:///w/brain#0.1.0", "lib", "brain", false), None);
        assert!(test_binary("no JSON").is_none());
    }
}
