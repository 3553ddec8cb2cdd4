//! `kube-proxy-iptables`: the sources that endpoints see, session affinity, stale UDP flows, foreign changes, and programs that
//! fail.

use std::{
    env, fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command, thread::sleep, time::Duration,
};

use tests::{
    TIMEOUT, Transport, eventually, exchange, program_or_skip,
    test_cluster::{CLIENT, N1, P1, P2},
    udp_socket,
};

use super::BackendCluster;
use crate::{
    kube_proxy_rules::saved,
    packet_path::{NODE_PORT, at, check, cluster_ips, internal, policies::N1_AT_POD, replies},
};

const MODES: [&str; 2] = ["nft", "legacy"];
/// What writes rules; tests replace it.
const RESTORE: &str = "iptables-nft-restore";

fn backend(it: &BackendCluster, mode: &str) -> Command {
    it.backend("kube-proxy-iptables", &["--iptables-mode", mode])
}

/// The IPv4 rules of n1, without counters and times.
#[track_caller]
fn rules(it: &BackendCluster, mode: &str) -> String {
    saved(&it.n1, Path::new(&format!("iptables-{mode}-save"))).join("\n")
}

#[track_caller]
fn wait_for(it: &BackendCluster, mode: &str, is_right: impl Fn(&str) -> bool) {
    let done = eventually(TIMEOUT, || is_right(&rules(it, mode)));
    assert!(done, "{}\n{}", rules(it, mode), it.log());
}

fn traffic(mode: &str) {
    let mut services = [
        internal("web", 1).endpoint("p1", &P1),
        internal("local", 2).endpoint("p1", &P1).external_local(),
        internal("sticky", 3).endpoint("p1", &P1).endpoint("p2", &P2).affinity(100),
        internal("moved", 4).endpoint("p1", &P1),
    ];
    let Some(it) = BackendCluster::or_skip(&services) else { return };
    eprintln!("with --iptables-mode={mode}");
    let _backend = it.spawn(backend(&it, mode));
    wait_for(&it, mode, |it| it.contains("default/moved"));

    for (index, masqueraded) in N1_AT_POD.into_iter().enumerate() {
        let cluster_ip = at(cluster_ips(1)[index], 80);
        let node_port = |n: u16| at(N1[index], NODE_PORT + n);
        // A pod keeps its source, unless it reaches itself; that of others is masqueraded.
        check(&it.pods[1], cluster_ip, &[("p1", P2[index])]);
        for from in [&it.pods[0], &it.n1, &it.client] {
            check(from, cluster_ip, &[("p1", masqueraded)]);
        }
        // So it is at node ports, where the policy Local keeps all sources.
        check(&it.client, node_port(1), &[("p1", masqueraded)]);
        check(&it.client, node_port(2), &[("p1", CLIENT[index])]);
        for n in [1, 2] {
            check(&it.pods[1], node_port(n), &[("p1", P2[index])]);
        }
    }
    let answers = replies(&it.client, Transport::Tcp, at(N1[0], NODE_PORT + 3));
    assert_eq!(answers.len(), 1, "a client keeps its endpoint: {answers:?}");
    // What is masqueraded is accepted.
    it.run_line(&format!("iptables-{mode} -P FORWARD DROP"));
    check(&it.client, at(N1[0], NODE_PORT + 1), &[("p1", N1_AT_POD[0])]);
    it.run_line(&format!("iptables-{mode} -P FORWARD ACCEPT"));

    if program_or_skip("conntrack").is_none() {
        return;
    }
    let moved = at(cluster_ips(4)[0], 80);
    let socket = it.client.run(|| udp_socket(moved)).unwrap();
    let is_answered_by = |name: &str| exchange(&socket, moved).is_ok_and(|(it, _)| it.starts_with(name));
    assert!(is_answered_by("p1 "));
    services[3] = internal("moved", 4).endpoint("p2", &P2);
    it.write(&services);
    assert!(
        eventually(TIMEOUT, || is_answered_by("p2 ")),
        "a flow stays at a removed endpoint: {}",
        it.log()
    );
}

#[test]
fn endpoints_see_the_right_source_and_clients_keep_theirs() {
    MODES.into_iter().for_each(traffic);
}

#[test]
fn foreign_changes_are_undone_and_foreign_rules_stay() {
    for mode in MODES {
        let services = [internal("web", 1).endpoint("p1", &P1)];
        let Some(it) = BackendCluster::or_skip(&services) else { return };
        let iptables = |arguments: &str| drop(it.run_line(&format!("iptables-{mode} {arguments}")));
        // Rules of others, and a chain of an earlier process, which is still in use.
        for arguments in [
            "-t nat -N CNI-X",
            "-t nat -A CNI-X -s 10.9.0.0/16 -j RETURN",
            "-t nat -A PREROUTING -j CNI-X",
            "-A INPUT -s 203.0.113.9/32 -j DROP",
        ] {
            iptables(arguments);
        }
        let foreign = rules(&it, mode);
        iptables("-t nat -N KPI-SVC-OLD");
        iptables("-t nat -A OUTPUT -j KPI-SVC-OLD");
        let process = it.spawn(backend(&it, mode));
        wait_for(&it, mode, |it| it.contains("default/web") && !it.contains("KPI-SVC-OLD"));
        let written = rules(&it, mode);
        let chain = written.lines().find_map(|it| it.strip_prefix(":KPI-SVC")?.split(' ').next()).unwrap();
        // The number of rules says nothing of those that are replaced: they were listed before.
        sleep(Duration::from_millis(1500));
        for arguments in [
            &format!("-t nat -R KPI-SVC{chain} 2 -p tcp -j DNAT --to-destination 10.244.1.12:8080"),
            "-t nat -F KPI-SERVICES",
            "-t nat -F OUTPUT",
            "-F FORWARD",
            "-t nat -D PREROUTING -j KPI-SERVICES",
            "-t nat -I OUTPUT -j KPI-SERVICES",
            "-t nat -N KPI-SVC-NEW",
        ] {
            iptables(arguments);
            wait_for(&it, mode, |it| it == written);
        }
        drop(process);
        assert_eq!(rules(&it, mode), written, "the rules stay when the process ends");
        let mut cleanup = backend(&it, mode);
        cleanup.arg("--cleanup");
        assert!(it.succeeds(cleanup), "{}", it.log());
        assert_eq!(rules(&it, mode), foreign);
    }
}

/// A program in a folder for PATH, instead of that of the system.
fn program(folder: &Path, name: &str, script: &str) {
    let file = folder.join(name);
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
}

/// PATH with the programs of a folder before those of the system.
fn path_with(folder: &Path) -> String {
    format!("{}:{}", folder.display(), env::var("PATH").unwrap())
}

#[test]
fn a_program_that_fails_leaves_the_last_state() {
    let Some(real) = program_or_skip(RESTORE) else { return };
    let Some(it) = BackendCluster::or_skip(&[internal("web", 1).endpoint("p1", &P1)]) else { return };
    let folder = it.sandbox().files();
    // Sends a part of the input and fails, as long as there is the file `half`.
    let (real, half) = (real.display(), folder.join("half"));
    let script =
        format!("[ -e {half} ] || exec {real} \"$@\"\nhead -c 200 | {real} \"$@\"", half = half.display());
    program(folder, RESTORE, &script);
    let mut command = backend(&it, "nft");
    command.env("PATH", path_with(folder));
    let _backend = it.spawn(command);
    wait_for(&it, "nft", |it| it.contains("10.244.1.10:8080"));
    let written = rules(&it, "nft");

    fs::write(&half, "").unwrap();
    it.write(&[internal("web", 1).endpoint("p2", &P2), internal("new", 2)]);
    assert!(eventually(TIMEOUT, || it.log().contains("cannot apply the state")), "{}", it.log());
    assert_eq!(rules(&it, "nft"), written, "{}", it.log());
    fs::remove_file(&half).unwrap();
    wait_for(&it, "nft", |it| {
        it.contains("10.244.1.11:8080") && it.contains("default/new") && !it.contains("10.244.1.10:8080")
    });
}

#[test]
fn what_does_not_work_is_named_and_the_rest_is_served() {
    let Some(real) = program_or_skip(RESTORE) else { return };
    let services = [internal("web", 1).endpoint("p1", &P1).affinity(100)];
    let Some(it) = BackendCluster::or_skip(&services) else { return };
    let run = |path: &str| {
        let mut command = backend(&it, "nft");
        command.arg("--once").env("PATH", path);
        (it.succeeds(command), it.log())
    };
    let (is_applied, log) = run("/usr/bin:/bin");
    assert!(!is_applied && log.contains("cannot run `iptables-nft-restore`: No such file"), "{log}");
    assert!(log.contains("install the package iptables"), "{log}");

    let (folder, real) = (it.sandbox().files(), real.display());
    let path = path_with(folder);
    let message = "line 3: RULE_APPEND failed (No such file or directory): rule in chain KPI-PROBE";
    let script = format!("cat > /dev/null; echo '{message}' >&2; exit 4");
    program(folder, "ip6tables-nft-restore", &script);
    let (is_applied, log) = run(&path);
    assert!(is_applied && log.contains("IPv6 does not work here") && log.contains("default/web"), "{log}");
    assert!(rules(&it, "nft").contains("default/web"));

    // Without the match `recent`, the Service is served without session affinity; without `bpf`, by other rules.
    let without = |word: &str| {
        let script = format!("case $input in *{word}*) {script};; esac");
        program(folder, RESTORE, &format!("input=$(cat); {script}; echo \"$input\" | {real} \"$@\""));
    };
    without("recent");
    let (is_applied, log) = run(&path);
    assert!(is_applied && log.contains("session affinity does not work here"), "{log}");
    assert!(rules(&it, "nft").contains("default/web"));
    without("bpf");
    let (is_applied, log) = run(&path);
    assert!(is_applied && log.contains("an option of iptables does not work here"), "{log}");
    assert!(rules(&it, "nft").contains("-s 10.244.1.10"), "{log}");

    program(folder, RESTORE, &script);
    let (is_applied, log) = run(&path);
    assert!(!is_applied && log.contains(message), "{log}");
    assert!(log.contains("; line 3 is `-A KPI-PROBE -j RETURN`"), "{log}");
}
