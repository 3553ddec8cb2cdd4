//! `cleanup --kube-proxy` removes what a removed kube-proxy has left in the kernel, and nothing of others.

use std::{
    fs,
    io::Write as _,
    net::TcpListener,
    process::{Command, Stdio},
};

use tests::{Build, NetNs, Output, assert_contains, program_or_skip, run};

/// What kube-proxy 1.36 writes in iptables mode, each line after a `-`, beside the chains of the kubelet and of network
/// plugins.
const IPTABLES: &str = include_str!("kube_proxy_rules/iptables.txt");

/// What kube-proxy 1.36 writes in nftables mode, and a table of another program.
const NFTABLES: &str = include_str!("kube_proxy_rules/nftables.nft");

/// A program that reads standard input.
#[track_caller]
fn feed(netns: &NetNs, program: &str, arguments: &[&str], input: &str) {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = netns.run(|| command.spawn()).unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// All rules, or those of others.
fn iptables(with_kube_proxy: bool, is_ipv6: bool) -> String {
    let lines = IPTABLES.lines().filter_map(|line| match line.strip_prefix('-') {
        Some(rest) if rest.starts_with(['-', ':']) => with_kube_proxy.then_some(rest),
        _ => Some(line),
    });
    let text = lines.collect::<Vec<_>>().join("\n") + "\n";
    if !is_ipv6 {
        return text;
    }
    text.replace("10.244.0.5:6443", "[fd00::5]:6443")
        .replace("10.244.0.5/32", "fd00::5/128")
        .replace("10.244.0.0/16", "fd00::/64")
        .replace("10.96.0.", "fd00::9")
        .replace("/32", "/128")
        .replace("127.0.0.0/8", "::1/128")
}

/// What a program saves, without its comments and counters.
#[track_caller]
fn saved(netns: &NetNs, program: &str) -> Vec<String> {
    let text = netns.run(|| run(&mut Command::new(program))).success();
    let lines = text.lines().filter(|it| !it.starts_with('#'));
    lines.map(|it| it.split(" [").next().unwrap().to_owned()).collect()
}

fn cleanup(netns: &NetNs, arguments: &[&str]) -> Output {
    netns.run(|| run(Command::new(Build::Product.binary()).args(["cleanup", "--kube-proxy"]).args(arguments)))
}

#[test]
fn rules_that_a_removed_kube_proxy_left_are_removed() {
    const PROGRAMS: [(&str, bool); 2] = [("iptables-nft", false), ("ip6tables-nft", true)];
    for it in ["nft", "iptables-nft-restore", "ip6tables-nft-restore"] {
        let Some(_program) = program_or_skip(it) else { return };
    }
    // In the second namespace there was never a kube-proxy.
    let [left, clean] = [(), ()].map(|()| NetNs::new().unwrap());
    for (program, is_ipv6) in PROGRAMS {
        let program = format!("{program}-restore");
        feed(&left, &program, &[], &iptables(true, is_ipv6));
        feed(&clean, &program, &[], &iptables(false, is_ipv6));
    }
    feed(&left, "nft", &["-f", "-"], NFTABLES);
    left.ip(&["link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "other"]).unwrap();

    let stderr = cleanup(&left, &[]).exits_with(0);
    assert_contains(&stderr, &["removed table kube-proxy (nftables)", "rules that jump there"]);
    assert_contains(&stderr, &["(iptables, nft)", "removed interface kube-ipvs0"]);
    for (program, _) in PROGRAMS {
        let program = format!("{program}-save");
        assert_eq!(saved(&left, &program), saved(&clean, &program), "{program}");
    }
    let tables = left.run(|| run(Command::new("nft").args(["list", "tables"]))).success();
    let tables: Vec<_> = tables.lines().filter(|it| it.contains("kube-proxy")).collect();
    assert_eq!(tables, ["table ip kube-proxy-of-others", "table inet kube-proxy"]);
    left.ip(&["link", "show", "kube-ipvs0"]).unwrap_err();
    // Again: nothing to do, and no error.
    let stderr = cleanup(&left, &[]).exits_with(0);
    assert!(stderr.contains("nothing to remove"), "{stderr}");
}

#[test]
fn rules_of_legacy_iptables_are_removed() {
    for it in ["iptables-legacy-restore", "ip6tables-legacy-restore"] {
        let Some(_program) = program_or_skip(it) else { return };
    }
    let [left, clean] = [(), ()].map(|()| NetNs::new().unwrap());
    for (program, is_ipv6) in [("iptables-legacy-restore", false), ("ip6tables-legacy-restore", true)] {
        feed(&left, program, &[], &iptables(true, is_ipv6));
        feed(&clean, program, &[], &iptables(false, is_ipv6));
    }
    // Without the programs, what may remain is named.
    let mut command = Command::new(Build::Product.binary());
    command.args(["cleanup", "--kube-proxy"]).env("PATH", "/nowhere");
    let stderr = left.run(|| run(&mut command)).exits_with(0);
    assert!(stderr.contains("not removed: table nat of iptables (legacy)"), "{stderr}");
    assert!(stderr.contains("`kube-proxy --cleanup`"), "{stderr}");

    let stderr = cleanup(&left, &[]).exits_with(0);
    assert!(stderr.contains("removed its chains in table filter (ip6tables, legacy)"), "{stderr}");
    for program in ["iptables-legacy-save", "ip6tables-legacy-save"] {
        assert_eq!(saved(&left, program), saved(&clean, program), "{program}");
    }
}

#[test]
fn rules_of_a_running_kube_proxy_are_kept() {
    let Some(_nft) = program_or_skip("nft") else { return };
    let netns = NetNs::new().unwrap();
    feed(&netns, "nft", &["-f", "-"], NFTABLES);
    let has_rules = || {
        let tables = netns.run(|| run(Command::new("nft").args(["list", "tables"]))).success();
        tables.lines().any(|it| it == "table ip kube-proxy")
    };
    // It is recognized by its name, or by its port where its processes are invisible.
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("kube-proxy");
    fs::copy("/bin/sleep", &program).unwrap();
    let mut process = Command::new(program).arg("600").spawn().unwrap();
    let Output { code, stderr, .. } = cleanup(&netns, &[]);
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("a process is named kube-proxy; stop it first, or give --force"), "{stderr}");
    let port = netns.run(|| TcpListener::bind("127.0.0.1:10256").unwrap());
    let stderr = cleanup(&netns, &[]).exits_with(1);
    assert!(stderr.contains("another program than this one answers at 127.0.0.1:10256"), "{stderr}");
    assert!(has_rules());
    let _ = cleanup(&netns, &["--force"]).success();
    assert!(!has_rules());
    drop(port);
}
