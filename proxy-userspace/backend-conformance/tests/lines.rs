//! The example that answers by the line protocol passes, and broken backends fail with their cases named.

#![expect(clippy::unwrap_used, reason = "a failed helper fails the test")]

use std::{
    cell::RefCell,
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use backend_conformance::{Interface, Outcome, Report, RunError, RunOptions, Skips, names, run};

/// The example `lines` of the contract.
fn example() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let binary = test.parent().and_then(Path::parent).unwrap().join("examples/lines");
    assert!(binary.exists(), "{} is missing: run the tests with `cargo xtask test`", binary.display());
    binary
}

fn options(command: &[&str], filter: &str) -> RunOptions {
    RunOptions {
        command: command.iter().map(OsString::from).collect(),
        interface: Interface::Lines,
        log: None,
        timeout: Duration::from_secs(30),
        filter: Some(filter.to_owned()).filter(|it| !it.is_empty()),
        skips: Skips::default(),
        keep_going: false,
    }
}

fn play(options: &RunOptions) -> Report {
    run(options, &|_| {}).unwrap()
}

/// The results of a run, and its progress.
fn watch(options: &RunOptions) -> (Report, Vec<String>) {
    let progress = RefCell::new(Vec::new());
    let report = run(options, &|it| progress.borrow_mut().push(it.to_owned())).unwrap();
    (report, progress.into_inner())
}

/// The cases that fail if the example's questions or answers pass through a command.
fn failing(pipe: &str, filter: &str) -> Vec<String> {
    let shell = pipe.replace("BACKEND", &example().display().to_string());
    let report = play(&options(&["sh", "-c", &shell], filter));
    let failed = report.0.into_iter().filter(|it| matches!(it.outcome, Outcome::Failed(_)));
    failed.map(|it| it.name).collect()
}

#[test]
fn the_example_passes_every_case() {
    let example = example();
    let report = play(&options(&[example.to_str().unwrap()], ""));
    assert!(report.is_success(), "{}", report.summary());
    assert_eq!(report.0.len(), names().len());
    assert!(report.0.iter().all(|it| matches!(it.outcome, Outcome::Passed { questions } if questions > 1)));
}

#[test]
fn broken_backends_fail_with_their_cases_named() {
    // Refuses what must be dropped.
    let failed = failing("BACKEND | sed -u 's/^drop$/refuse/'", "policies/");
    assert!(failed.iter().any(|it| it.starts_with("policies/")), "{failed:?}");
    assert!(!failed.contains(&"policies/cluster-policy-uses-every-ready-endpoint".to_owned()), "{failed:?}");
    // Takes outside traffic for traffic of the cluster.
    let failed = failing("sed -u 's/^lookup 172.30.0.9/lookup 10.255.0.9/' | BACKEND", "policies/");
    assert!(failed.contains(&"policies/external-local-with-remote-endpoints-only".to_owned()), "{failed:?}");
    // Does not serve UDP.
    let failed = failing("sed -u 's/UDP$/SCTP/' | BACKEND", "frontends/");
    assert!(failed.contains(&"frontends/tcp-and-udp-on-one-port".to_owned()), "{failed:?}");
}

#[test]
fn what_is_skipped_is_neither_asked_nor_passed() {
    let example = example();
    let mut options =
        options(&["sh", "-c", &format!("sed -u 's/UDP$/SCTP/' | {}", example.display())], "frontends/");
    options.skips = Skips::parse("udp: not implemented\nfrontends/sctp: not implemented").unwrap();
    let report = play(&options);
    assert!(report.is_success(), "{}", report.summary());
    let skipped = report.0.iter().filter(|it| matches!(it.outcome, Outcome::Skipped(_)));
    assert_eq!(skipped.map(|it| it.name.as_str()).collect::<Vec<_>>(), ["frontends/sctp"]);
}

#[test]
fn a_case_is_reported_when_it_ends() {
    let shell = format!("{} | sed -u 's/^drop$/refuse/'", example().display());
    let mut options = options(&["sh", "-c", &shell], "policies/");
    options.skips = Skips::parse("policies/cluster-policy-*: not today").unwrap();
    let (report, progress) = watch(&options);
    assert_eq!(report.0.iter().map(ToString::to_string).collect::<Vec<_>>(), progress);
    let line = |of: &str| progress.iter().find(|it| it.contains(of)).unwrap().as_str();
    assert_eq!(
        line("cluster-policy-uses-every-ready-endpoint"),
        "skip  policies/cluster-policy-uses-every-ready-endpoint: not today"
    );
    assert!(
        line("internal-local-uses").starts_with("pass  policies/internal-local-uses-the-local-endpoints: ")
    );
    let failed = line("\"refuse\", not drop");
    assert!(failed.starts_with("FAIL  policies/") && failed.contains("\n      lookup "), "{failed}");
}

#[test]
fn ten_failures_in_a_row_end_the_run() {
    let silent = RunOptions { timeout: Duration::from_millis(20), ..options(&["sleep", "60"], "") };
    let (report, progress) = watch(&silent);
    assert!(progress.iter().zip(names()).all(|(line, name)| line.starts_with(&format!("FAIL  {name}: "))));
    assert_eq!((progress.len(), report.0.len()), (10, names().len()));
    assert!(report.0[10..].iter().all(|it| it.outcome == Outcome::NotRun));

    let (report, progress) =
        watch(&RunOptions { keep_going: true, filter: Some("frontends/".to_owned()), ..silent });
    assert!(progress.len() > 10 && progress.len() == report.0.len(), "{progress:?}");
    assert!(report.0.iter().all(|it| matches!(it.outcome, Outcome::Failed(_))));
}

#[test]
fn a_long_wait_is_reported_once() {
    // One answers nothing, the other always the same.
    for command in [&["sleep", "60"][..], &["cat"]] {
        let options =
            RunOptions { timeout: Duration::from_millis(2500), ..options(command, "an-empty-state") };
        let (_, progress) = watch(&options);
        assert_eq!(progress.len(), 2, "{progress:?}");
        assert!(progress[0].starts_with("wait  streams/an-empty-state-removes-everything: "), "{progress:?}");
    }
}

#[test]
fn a_backend_that_ends_or_says_nothing_is_reported() {
    let reason = |shell: &str| {
        let options = RunOptions {
            timeout: Duration::from_millis(200),
            ..options(&["sh", "-c", shell], "an-empty-state")
        };
        match &play(&options).0[0].outcome {
            Outcome::Failed(reason) => reason.clone(),
            other => panic!("{other:?}"),
        }
    };
    assert!(reason("exit 3").contains("the backend ended"));
    assert!(reason("sleep 60").contains("no answer to `lookup "));
    assert!(reason("while read -r it; do echo; done").contains("the state was not applied"));
    let error = run(&options(&["/no/such/backend"], ""), &|_| {}).unwrap_err();
    assert!(error.to_string().contains("/no/such/backend"), "{error}");
    assert!(matches!(run(&options(&["true"], "no such case"), &|_| {}), Err(RunError::NoCase(_))));
}
