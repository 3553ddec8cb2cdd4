//! The commands of docs/install.md, as a shell splits them: each is known, with every flag.
//!
//! The shell runs them with stand-ins for the programs, which record how they are called. `kubectl` and the proxy's binary
//! parse what was recorded, and stop before they do anything: at `--help`.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
};

use build_tools::command::workspace;
use tests::{Build, run, skip};

/// Every program that the commands call.
const PROGRAMS: [&str; 10] = [
    "cargo",
    "curl",
    "docker",
    "install",
    "kind",
    "kube-proxy-ebpf",
    "kubectl",
    "openssl",
    "skopeo",
    "mount",
];

/// The blocks of commands, without their prompts.
fn blocks() -> Vec<String> {
    let text = fs::read_to_string(workspace().join("docs/install.md")).unwrap();
    let blocks = text.split("```console\n").skip(1).map(|it| it.split("```").next().unwrap());
    let command = |line: &str| {
        let line = line.trim_start();
        let without_prompt = line.strip_prefix("$ ").or_else(|| line.strip_prefix("# "));
        without_prompt.unwrap_or(line).to_owned() + "\n"
    };
    blocks.map(|it| it.lines().map(command).collect()).collect()
}

/// Every call of a program in a script: its name and its arguments.
fn calls(folder: &Path, script: &str) -> Vec<Vec<String>> {
    let record = folder.join("calls");
    fs::write(&record, "").unwrap();
    for program in PROGRAMS {
        let path = folder.join(program);
        // What `$(…)` and loops use is the output.
        let text = "#!/bin/sh\nprintf '%s\\0' \"${0##*/}\" \"$@\" >>calls\nprintf '\\n' >>calls\necho name\n";
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut shell = Command::new("/bin/sh");
    let path = format!("{}:/usr/bin:/bin", folder.display());
    let output = run(shell.args(["-euc", script]).env("PATH", path).current_dir(folder).stdin(Stdio::null()));
    assert_eq!(output.code, Some(0), "{script}: {}", output.stderr);
    let recorded = fs::read_to_string(record).unwrap();
    let lines = recorded.split_terminator("\0\n");
    lines.map(|it| it.split('\0').map(ToOwned::to_owned).collect()).collect()
}

/// Parses arguments by a program, which prints its help.
#[track_caller]
fn parse(program: &Path, arguments: &[String]) {
    let output = run(Command::new(program).args(arguments).arg("--help"));
    assert_eq!(output.code, Some(0), "{} {}: {}", program.display(), arguments.join(" "), output.stderr);
}

#[test]
fn every_command_of_the_install_page_is_parsed() {
    let has_kubectl = Command::new("kubectl").args(["version", "--client"]).output().is_ok();
    if !has_kubectl {
        skip("kubectl is not installed");
    }
    let (mut called, mut commands) = (BTreeSet::new(), BTreeSet::new());
    for block in blocks() {
        let folder = tempfile::tempdir().unwrap();
        for call in calls(folder.path(), &block) {
            let (program, mut arguments) = (call[0].clone(), &call[1..]);
            let mut inner = (program == "kube-proxy-ebpf").then_some(arguments);
            if program == "kubectl" && arguments[0] != "service-proxy" {
                let end = arguments.iter().position(|it| it == "--").unwrap_or(arguments.len());
                inner = arguments.get(end + 1..);
                arguments = &arguments[..end];
                if has_kubectl {
                    parse("kubectl".as_ref(), arguments);
                }
                if let Some([path, rest @ ..]) = inner {
                    assert_eq!(path, "/usr/local/bin/kube-proxy-ebpf");
                    inner = Some(rest);
                }
            }
            if let Some(inner) = inner {
                parse(&Build::Product.binary(), inner);
                commands.insert(inner[0].clone());
            }
            called.insert(program);
        }
    }
    for it in ["check", "status", "cleanup"] {
        assert!(commands.contains(it), "{it} is not among {commands:?}");
    }
    assert!(called.contains("kubectl") && called.contains("docker"), "{called:?}");
}
