//! `backend-conformance` asks this program's own backends by packets and sockets, and names the cases of a broken one.

use std::{
    fs,
    process::Command,
    thread::{scope, sleep},
    time::Duration,
};

use tests::{
    Build, Sandbox, TIMEOUT,
    agent::{Output, run},
    scaled,
};

/// Asks a backend; `None` if the machine lacks what every test here needs.
fn ask(arguments: &[&str]) -> Option<Output> {
    let _sandbox = Sandbox::or_skip()?;
    let mut command = Command::new(Build::Product.binary());
    // The harness turns the packet path off for proxies that share a network namespace with others.
    command.arg("backend-conformance").args(["--timeout", &scaled(TIMEOUT).as_secs().to_string()]);
    command.args(arguments).env_remove("KUBE_PROXY_EBPF_PACKETS");
    Some(run(&mut command))
}

#[track_caller]
fn assert_passes(backend: &str) {
    let Some(output) = ask(&["--backend", backend]) else { return };
    let text = output.success();
    assert!(text.ends_with(" passed, 0 failed, 0 skipped\n"), "{text}");
}

#[test]
fn the_ebpf_backend_passes_every_case() {
    assert_passes("ebpf");
}

#[test]
fn the_nftables_backend_passes_every_case() {
    assert_passes("nft");
}

#[test]
fn the_userspace_backend_passes_every_case() {
    assert_passes("userspace");
}

/// Thousands that nothing ends fill the queues of the kernel with their retransmissions, which then loses a question.
#[test]
fn the_connections_of_answered_questions_end() {
    const FIN_WAIT1: &str = "04";
    let mut most = 0;
    let asked = scope(|scope| {
        let asked = scope.spawn(|| ask(&["--backend", "userspace", "--filter", "streams/the-same-state"]));
        while !asked.is_finished() {
            most = most.max(backend_connections(FIN_WAIT1));
            sleep(Duration::from_millis(200));
        }
        asked.join()
    });
    let Some(output) = asked.unwrap() else { return };
    assert!(output.success().ends_with(" passed, 0 failed, 0 skipped\n"));
    assert!(most < 100, "{most} connections of the backend wait for the end of the other side");
}

/// How many connections of the backend that a harness of this process has started are in a state, as the kernel writes it.
fn backend_connections(state: &str) -> usize {
    let children = |of: u32| {
        let tasks = fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
        let lists = tasks.filter_map(|it| fs::read_to_string(it.path().join("children")).ok());
        lists.flat_map(|it| it.split_whitespace().filter_map(|it| it.parse().ok()).collect::<Vec<u32>>())
    };
    let backends = children(std::process::id()).flat_map(children).collect::<Vec<_>>();
    let tables = backends.iter().flat_map(|it| ["tcp", "tcp6"].map(|name| format!("/proc/{it}/net/{name}")));
    let count = |table: String| {
        table.lines().skip(1).filter(|it| it.split_whitespace().nth(3) == Some(state)).count()
    };
    tables.filter_map(|it| fs::read_to_string(it).ok()).map(count).sum()
}

/// It takes traffic from outside for traffic of pods, and no pods for pods.
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
    let has_failed =
        |case: &str| output.stdout.lines().any(|it| it.starts_with("FAILED") && it.contains(case));
    assert!(has_failed("policies/external-local-with-remote-endpoints-only"), "{}", output.stdout);
    assert!(!has_failed("policies/internal-local-uses-the-local-endpoints"), "{}", output.stdout);
}
