//! `backend-conformance` asks this program's own backends by packets and sockets, and names the cases of a broken one.

use std::{
    fs,
    panic::resume_unwind,
    process::Command,
    thread::{scope, sleep},
    time::Duration,
};

use build_tools::{
    build::backend_binary,
    command::workspace,
    other_systems::{windows_binary, wine},
};
use tests::{Build, Output, Sandbox, TIMEOUT, assert_contains, run, scaled, skip};

/// Asks a backend; `None` if the machine lacks what every test here needs.
pub(crate) fn ask(arguments: &[&str]) -> Option<Output> {
    let _sandbox = Sandbox::or_skip()?;
    let mut command = Command::new(Build::Product.binary());
    // The harness turns the packet path off for proxies that share a network namespace with others.
    command.arg("backend-conformance").args(["--timeout", &scaled(TIMEOUT).as_secs().to_string()]);
    command.args(arguments).env_remove("KUBE_PROXY_EBPF_PACKETS");
    Some(run(&mut command))
}

/// Checks that a backend passed, unless the machine lacks something.
#[track_caller]
pub(crate) fn assert_passed(output: Option<Output>) {
    let text = output.map(Output::success);
    assert!(text.as_ref().is_none_or(|it| it.ends_with(" passed, 0 failed, 0 skipped\n")), "{text:?}");
}

#[test]
fn the_ebpf_backend_passes_every_case() {
    assert_passed(ask(&["--backend", "ebpf"]));
}

#[test]
fn the_nftables_backend_passes_every_case() {
    assert_passed(ask(&["--backend", "nft"]));
}

#[test]
fn the_userspace_backend_passes_every_case() {
    assert_passed(ask_userspace(""));
}

#[test]
fn the_iptables_backend_passes_every_case_by_either_tool() {
    let binary = backend_binary("kube-proxy-iptables");
    for mode in ["nft", "legacy"] {
        let backend = ["--iptables-mode", mode, "--healthz-bind-address=", "--metrics-bind-address="];
        let kit = ["--packets", "--", binary.to_str().unwrap()];
        println!("{mode}");
        assert_passed(ask(&[&kit, &backend[..]].concat()));
    }
}

/// Asks `kube-proxy-userspace`, which serves all but SCTP.
fn ask_userspace(filter: &str) -> Option<Output> {
    let binary = backend_binary("kube-proxy-userspace");
    let skips = workspace().join("backends/userspace/conformance-skips.txt");
    let backend = ["--listen", "services", "--healthz-bind-address=", "--metrics-bind-address="];
    let kit = ["--listeners", "--filter", filter, "--skip", skips.to_str().unwrap(), "--"];
    ask(&[&kit[..], &[binary.to_str().unwrap()], &backend].concat())
}

/// The cases that take minutes under Wine are left to `cargo xtask interop`.
#[test]
fn the_userspace_backend_for_windows_passes_under_wine() {
    const SLOW: [&str; 3] = ["streams/the-same-state*", "streams/a-brain-killed*", "scale/*"];
    let (binary, wine) = (windows_binary(), wine());
    let Some(wine) = wine.filter(|_| binary.exists()) else {
        return skip("Wine and a compiler for Windows are needed");
    };
    let folder = tempfile::tempdir().unwrap();
    let skips = folder.path().join("skips");
    let mut text =
        fs::read_to_string(workspace().join("backends/userspace/conformance-skips-wine.txt")).unwrap();
    text.extend(SLOW.map(|it| format!("{it}: minutes\n")));
    fs::write(&skips, text).unwrap();
    let prefix = format!("WINEPREFIX={}", folder.path().join("wine").display());
    let environment = ["env", &prefix, "WINEDEBUG=-all", wine.to_str().unwrap(), binary.to_str().unwrap()];
    let backend = ["--listen", "services", "--healthz-bind-address=", "--metrics-bind-address="];
    let kit = ["--listeners", "--skip", skips.to_str().unwrap(), "--"];
    let Some(output) = ask(&[&kit, &environment[..], &backend[..]].concat()) else { return };
    let text = output.success();
    assert!(text.contains(" 0 failed, "), "{text}");
    assert!(text.split(' ').next().is_some_and(|it| it.parse::<u32>().is_ok_and(|it| it > 70)), "{text}");
}

/// Asks the backend of sockets, and looks again and again at the processes that may be it.
fn asked_userspace(filter: &str, mut look: impl FnMut(&[u32])) -> Option<Output> {
    scope(|scope| {
        let asked = scope.spawn(|| ask_userspace(filter));
        while !asked.is_finished() {
            look(&children(std::process::id()).flat_map(children).collect::<Vec<_>>());
            sleep(Duration::from_millis(50));
        }
        asked.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

fn children(of: u32) -> impl Iterator<Item = u32> {
    let tasks = fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|it| fs::read_to_string(it.path().join("children")).ok());
    lists.flat_map(|it| it.split_whitespace().filter_map(|it| it.parse().ok()).collect::<Vec<_>>())
}

/// Thousands of connections that nothing ends fill the kernel's queues with retransmissions: it then loses a question.
#[test]
fn the_connections_of_answered_questions_end() {
    const FIN_WAIT1: &str = "04";
    let is_waiting = |line: &&str| line.split_whitespace().nth(3) == Some(FIN_WAIT1);
    let mut most = 0;
    let output = asked_userspace("streams/the-same-state", |backends| {
        let tables =
            backends.iter().flat_map(|it| ["tcp", "tcp6"].map(|name| format!("/proc/{it}/net/{name}")));
        let texts = tables.filter_map(|it| fs::read_to_string(it).ok());
        most = most.max(texts.map(|it| it.lines().filter(is_waiting).count()).sum());
    });
    assert_passed(output);
    assert!(most < 100, "{most} connections of the backend wait for the end of the other side");
}

/// The kernel loses first packets, the answers to those of the backend, and what acknowledges these.
#[test]
fn questions_and_answers_that_the_kernel_loses_are_sent_again() {
    const LOSS: &str = "table inet loss { chain first { type filter hook prerouting priority raw; \
        tcp flags syn numgen inc mod 80 == 0 counter drop; }; \
        chain third { type filter hook output priority raw; \
        oifname probe0 tcp flags & (syn | ack | fin | rst | psh) == ack numgen inc mod 80 == 0 counter drop; }; }";
    let nft = |backend: u32, arguments: &[&str]| {
        let namespace = format!("--net=/proc/{backend}/ns/net");
        run(Command::new("nsenter").args([&namespace, "nft"]).args(arguments))
    };
    let own = fs::read_link("/proc/self/ns/net").unwrap();
    let is_elsewhere = |it: &&u32| fs::read_link(format!("/proc/{it}/ns/net")).is_ok_and(|it| it != own);
    let mut rules = String::new();
    let output = asked_userspace("frontends/", |backends| {
        let Some(&backend) = backends.iter().find(is_elsewhere) else { return };
        // It may have ended, or be `ip`, which sets the network up.
        if rules.is_empty() {
            nft(backend, &[LOSS]);
        }
        let now = nft(backend, &["list", "ruleset"]);
        if now.code == Some(0) {
            rules = now.stdout;
        }
    });
    let Some(output) = output else { return };
    assert!(output.success().ends_with(" passed, 0 failed, 0 skipped\n"));
    assert!(rules.contains("packets") && !rules.contains("packets 0 "), "{rules}");
}

/// By its cluster CIDR, the backend takes clients outside for pods, and pods for clients outside.
#[test]
fn a_broken_backend_fails_with_the_case_named() {
    let binary = Build::Product.binary();
    let (binary, cidrs) = (binary.to_str().unwrap(), "172.30.0.0/16");
    let pages =
        ["--status-socket=", "--metrics-bind-address=", "--healthz-bind-address=", "--probe-bind-address="];
    let backend = [&[binary, "agent", "--backend", "nft", "--cluster-cidr", cidrs], &pages[..]].concat();
    let Some(output) = ask(&[&["--packets", "--filter", "policies/", "--"], &backend[..]].concat()) else {
        return;
    };
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    let has_failed = |case: &str| output.stdout.lines().any(|it| it == format!("FAIL  {case}"));
    assert!(has_failed("policies/external-local-with-remote-endpoints-only"), "{}", output.stdout);
    assert!(!has_failed("policies/internal-local-uses-the-local-endpoints"), "{}", output.stdout);
    assert_contains(&output.stderr, &["pass  policies/internal-local-uses-the-local-endpoints: "]);
}
