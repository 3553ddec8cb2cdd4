//! The command line as a whole, and the precedence of flags and configuration file.

use std::{collections::BTreeSet, fs, iter, path::Path};

use clap::{Args, Command};
use serde::Deserialize;

use super::{
    command,
    config::{CommandLine, File, ParseError},
};

const KUBEADM: &str = include_str!("kubeadm-config.yaml");
/// How each file begins.
const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

/// Parses words after the name of the program.
fn parse(words: &[&str]) -> Result<CommandLine, ParseError> {
    let words = iter::once("kube-proxy-ebpf").chain(words.iter().copied());
    CommandLine::parse(command(), words.map(Into::into))
}

/// Some flags alone, from these words.
pub(super) fn parse_flags<F: Args>(words: &[impl AsRef<str>]) -> Result<F, clap::Error> {
    let words = iter::once("test").chain(words.iter().map(AsRef::as_ref));
    F::from_arg_matches(&F::augment_args(Command::new("test")).try_get_matches_from(words)?)
}

/// The error of a wrong command line.
#[track_caller]
fn usage_error(parsed: Result<CommandLine, ParseError>) -> String {
    match parsed {
        Err(ParseError::Usage(error)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Parses a command with `--config FILE` and more words, where the file has this text.
fn line_of(name: &str, text: &str, words: &[&str]) -> Result<CommandLine, ParseError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.conf");
    fs::write(&path, text).unwrap();
    parse(&[&[name, &format!("--config={}", path.display())], words].concat())
}

/// Checks rows in the output of `--print-config`, with single blanks; each begins with its flag.
#[track_caller]
fn check_rows(line: &CommandLine, expect: &[&str]) {
    let printed = line.printed().unwrap();
    let rows: Vec<_> =
        printed.lines().map(|it| it.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for it in expect {
        assert!(rows.iter().any(|row| row == it), "{it} is not in\n{printed}");
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    about: String,
    command: Option<String>,
    #[serde(default)]
    flags: String,
    fields: Option<String>,
    text: Option<String>,
    #[serde(default)]
    rows: String,
    #[serde(default)]
    remarks: Vec<String>,
    error: Option<String>,
}

#[test]
fn each_file_is_used_as_its_case_says() {
    let cases: Vec<Case> = serde_saphyr::from_str(include_str!("config_cases.yaml")).unwrap();
    assert_eq!(cases.len(), 34, "no case is skipped unnoticed");
    let has = |found: &str, parts: &str| parts.split('…').all(|it| found.contains(it));
    for Case { about, command, flags, fields, text, rows, remarks, error } in cases {
        let text = text.or_else(|| fields.map(|it| format!("{HEAD}{it}\n")));
        let flags: Vec<_> = flags.split_whitespace().chain(["--print-config"]).collect();
        let command = command.as_deref().unwrap_or("run");
        match line_of(command, text.as_deref().unwrap_or(KUBEADM), &flags) {
            Ok(line) => {
                assert_eq!(error, None, "{about}");
                check_rows(&line, &rows.lines().collect::<Vec<_>>());
                let found: Vec<_> = line.remarks().collect();
                assert_eq!(found.len(), remarks.len(), "{about}: {found:?}");
                for it in remarks {
                    assert!(found.iter().any(|found| has(found, &it)), "{about}: {it} is not in {found:?}");
                }
            }
            Err(found) => {
                let is_of_file = matches!(found, ParseError::File(_));
                let found = found.to_string();
                assert!(error.is_some_and(|it| has(&found, &it)), "{about}: {found}");
                assert!(!is_of_file || !found.contains('\n'), "{about}: {found}");
            }
        }
    }
}

#[test]
fn flags_are_under_the_heading_of_their_subject() {
    let mut all = command();
    all.build();
    for (heading, prefixes) in [
        ("Passive health of endpoints", &["passive-health"][..]),
        ("Connection tracking", &["conntrack-", "proc-sys-net"]),
        ("Other processes", &["listen", "socket-mode", "socket-group", "tls-", "serve-any-node"]),
        ("Logging", &["log-format", "verbose", "v"]),
    ] {
        for it in all.get_subcommands().flat_map(Command::get_arguments) {
            let is_there = it.get_help_heading() == Some(heading) && !it.is_hide_set();
            let long = it.get_long().unwrap_or_default();
            assert!(!is_there || prefixes.iter().any(|prefix| long.starts_with(prefix)), "{heading}: {long}");
        }
        let run = all.find_subcommand("run").unwrap();
        assert!(run.get_arguments().any(|it| it.get_help_heading() == Some(heading)), "{heading}");
    }
}

#[test]
fn commands_that_only_inspect_use_the_file_without_remarks() {
    for command in ["check", "status"] {
        let invalid = KUBEADM.replace("metricsBindAddress: \"\"", "metricsBindAddress: nowhere");
        let Err(ParseError::File(error)) = line_of(command, &invalid, &[]) else {
            panic!("the file is ignored")
        };
        assert!(error.to_string().contains("nowhere"), "{error}");
        let line = line_of(command, KUBEADM, &[]).unwrap();
        assert_eq!(line.remarks().collect::<Vec<_>>(), [""; 0], "{command}");
    }
}

#[test]
fn commands_that_inspect_take_the_flags_that_the_process_was_started_with() {
    let run = "--source=kube --kube-api-server=https://192.0.2.1:6443 --node-name=n1 --packets=off --backend=ebpf \
               --cluster-cidr=10.0.0.0/8 --masquerade-all --socket-lb=host --pin-dir=/pins --cgroup=/cgroup \
               --status-socket=/status --metrics-bind-address=0 --feature-gates=NFTablesProxyMode=true \
               --listen=unix:///x --nodeport-addresses=primary";
    let agent = "--target=unix:///x --packets=off --tls-ca=ca --tls-cert=cert --tls-key=key";
    for (started, flags) in [("run", run), ("agent", agent)] {
        let flags: Vec<_> = flags.split(' ').collect();
        for command in [started, "check", "status", "dump"] {
            let line = line_of(command, KUBEADM, &flags);
            assert!(line.is_ok(), "{command}: {line:?}");
        }
    }
    // Not what belongs to one call.
    assert!(line_of("status", KUBEADM, &["--print-config"]).is_err());
    let mut command = command();
    let help = command.find_subcommand_mut("dump").unwrap().render_long_help().to_string();
    assert!(help.contains("--pin-dir") && !help.contains("--cluster-cidr"), "{help}");
}

#[test]
fn the_field_of_a_flags_value_is_known() {
    let text = KUBEADM.replace("detectLocalMode: \"\"", "detectLocalMode: BridgeInterface");
    let line = line_of("run", &text, &["--cluster-cidr=10.0.0.0/8"]).unwrap();
    let origins = line.origins();
    let of = |flag: &str| origins.iter().find(|it| it.0 == flag).map(|it| it.1.as_str());
    assert!(of("--detect-local-mode").is_some_and(|it| it.ends_with("config.conf: detectLocalMode")));
    assert_eq!(of("--cluster-cidr"), None, "the flag overrides the file");
}

#[test]
fn an_empty_value_is_the_default_switches_off_or_is_refused() {
    let parse = |words: &[&str]| parse(&[&["agent", "--print-config"], words].concat());
    let empty = ["--cluster-cidr=", "--nodeport-addresses=", "--bind-address=", "--hostname-override="];
    assert_eq!(parse(&empty).unwrap().printed(), parse(&[]).unwrap().printed());
    check_rows(&parse(&["--metrics-bind-address="]).unwrap(), &["--metrics-bind-address flag"]);
    for refused in [&["--tls-ca=", "--tls-cert=", "--tls-key="][..], &["--cgroup="]] {
        assert!(parse(refused).is_err(), "{refused:?}");
    }
}

#[test]
fn a_missing_file_is_reported_with_a_remedy() {
    let missing = File::read(Path::new("/no/such/file"), |_| true).unwrap_err().to_string();
    assert!(missing.contains("set --config to a readable file"), "{missing}");
}

#[test]
fn each_flag_has_an_environment_variable_except_those_that_belong_to_one_call() {
    let mut command = command();
    // This also checks that the command line is consistent.
    command.build();
    let flags = command.get_subcommands().filter(|it| it.get_name() != "help").flat_map(|it| {
        // What is accepted and ignored needs none.
        // The source of a question is not that of the process, and a trace is one call, as are the cases of a backend.
        let is_asked = |flag: &clap::Arg| match it.get_name() {
            "explain" => flag.get_long() == Some("source"),
            "trace" => flag.get_long() != Some("status-socket"),
            "backend-conformance" => true,
            _ => false,
        };
        let flags = it.get_arguments().filter(move |it| !it.is_hide_set() && !is_asked(it));
        let without = flags.filter(|it| it.get_env().is_none()).filter_map(clap::Arg::get_long);
        without.filter(|it| !matches!(*it, "help" | "version"))
    });
    let flags: BTreeSet<_> = flags.collect();
    // Not the constant of the product, which would agree with itself.
    let expected = "anonymize behind filter force has init-only kube-proxy limit once print-config sort \
                    wait-for-kube-proxy watch";
    assert_eq!(flags, expected.split(' ').collect::<BTreeSet<_>>());
}

#[test]
fn a_flag_of_kube_proxy_that_has_no_meaning_is_answered_with_the_reason() {
    let error = |words: &[&str]| usage_error(parse(words));
    let run = error(&["run", "--source=kube", "--iptables-min-sync-period=1s"]);
    for it in ["'--iptables-min-sync-period'", "kube-proxy's", "every change is applied at once"] {
        assert!(run.contains(it), "{it} is not in {run}");
    }
    assert!(!run.contains("similar"), "{run}");
    let brain = error(&["brain", "--source=kube", "--cluster-cidr=10.0.0.0/8"]);
    assert!(brain.contains("this command does not translate packets"), "{brain}");
    // Other flags have the usual answer.
    let misspelled = error(&["run", "--source=kube", "--cluster-cdr=10.0.0.0/8"]);
    assert!(misspelled.contains("similar") && misspelled.contains("--cluster-cidr"), "{misspelled}");
    let with_file = usage_error(line_of("run", KUBEADM, &["--ipvs-scheduler=rr"]));
    assert!(with_file.contains("IPVS is not used"), "{with_file}");
}
