//! `cleanup --kube-proxy` removes what a removed kube-proxy has left in the kernel, and nothing of others.

use std::{
    env, fs,
    io::Write as _,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use build_tools::command::KilledOnDrop;
use tests::{Build, NetNs, Output, assert_contains, program_or_skip, run};

/// What kube-proxy 1.36 writes in iptables mode, beside the chains of the kubelet and of network plugins.
const IPTABLES: &str = include_str!("kube_proxy_rules/iptables.txt");

/// What kube-proxy 1.36 writes in nftables mode, and a table of another program.
const NFTABLES: &str = include_str!("kube_proxy_rules/nftables.nft");

/// For each family the programs that restore and save its rules, and whether it is IPv6.
type Programs = [(PathBuf, PathBuf, bool); 2];

fn iptables_or_skip(kind: &str) -> Option<Programs> {
    let of = |family: &str, is_ipv6| {
        let [restore, save] = ["restore", "save"].map(|it| program_or_skip(&format!("{family}-{kind}-{it}")));
        Some((restore?, save?, is_ipv6))
    };
    Some([of("iptables", false)?, of("ip6tables", true)?])
}

#[track_caller]
pub(crate) fn feed(netns: &NetNs, program: &Path, arguments: &[&str], input: &str) {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = netns.run(|| command.spawn()).unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// All rules, or those of others.
fn iptables(with_kube_proxy: bool, is_ipv6: bool) -> String {
    let lines = IPTABLES.lines().filter(|it| !it.starts_with('#'));
    let lines = lines.filter_map(|line| match line.strip_prefix('-') {
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
pub(crate) fn saved(netns: &NetNs, program: &Path) -> Vec<String> {
    let text = netns.run(|| run(&mut Command::new(program))).success();
    let lines = text.lines().filter(|it| !it.starts_with('#'));
    lines.map(|it| it.split(" [").next().unwrap().to_owned()).collect()
}

/// A namespace with the rules of others, and those of kube-proxy if there was one.
fn namespace(programs: &Programs, with_kube_proxy: bool) -> NetNs {
    let netns = NetNs::new().unwrap();
    for (restore, _, is_ipv6) in programs {
        feed(&netns, restore, &[], &iptables(with_kube_proxy, *is_ipv6));
    }
    netns
}

/// Checks that a namespace has the rules of one in which there was never a kube-proxy.
#[track_caller]
fn assert_clean(netns: &NetNs, programs: &Programs) {
    let clean = namespace(programs, false);
    for (_, save, _) in programs {
        assert_eq!(saved(netns, save), saved(&clean, save), "{}", save.display());
    }
}

fn cleanup(netns: &NetNs, arguments: &[&str]) -> Output {
    let mut command = Command::new(Build::Product.binary());
    command.args(["cleanup", "--kube-proxy"]).args(arguments);
    // Where the test finds programs, too.
    command.env("PATH", env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin");
    netns.run(|| run(&mut command))
}

#[test]
fn rules_that_a_removed_kube_proxy_left_are_removed() {
    let (Some(nft), Some(programs)) = (program_or_skip("nft"), iptables_or_skip("nft")) else { return };
    let left = namespace(&programs, true);
    feed(&left, &nft, &["-f", "-"], NFTABLES);
    left.ip(&["link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "other"]).unwrap();

    let stderr = cleanup(&left, &[]).exits_with(0);
    assert_contains(&stderr, &["removed table kube-proxy (nftables)", "rules that jump there"]);
    assert_contains(&stderr, &["(iptables, nft)", "removed interface kube-ipvs0"]);
    assert_clean(&left, &programs);
    let tables = left.run(|| run(Command::new(nft).args(["list", "tables"]))).success();
    let tables: Vec<_> = tables.lines().filter(|it| it.contains("kube-proxy")).collect();
    assert_eq!(tables, ["table ip kube-proxy-of-others", "table inet kube-proxy"]);
    left.ip(&["link", "show", "kube-ipvs0"]).unwrap_err();
    // Again: nothing to do, and no error.
    assert_contains(&cleanup(&left, &[]).exits_with(0), &["nothing to remove"]);
}

#[test]
fn rules_of_legacy_iptables_are_removed() {
    let Some(programs) = iptables_or_skip("legacy") else { return };
    let left = namespace(&programs, true);
    // Without the programs, what may remain is named.
    let mut command = Command::new(Build::Product.binary());
    command.args(["cleanup", "--kube-proxy"]).env("PATH", "/nowhere");
    let stderr = left.run(|| run(&mut command)).exits_with(0);
    assert_contains(&stderr, &["not removed: table nat of iptables (legacy)", "`kube-proxy --cleanup`"]);

    let stderr = cleanup(&left, &[]).exits_with(0);
    assert_contains(&stderr, &["removed its chains in table filter (ip6tables, legacy)"]);
    assert_clean(&left, &programs);
}

#[test]
fn rules_of_a_running_kube_proxy_are_kept() {
    let Some(nft) = program_or_skip("nft") else { return };
    let netns = NetNs::new().unwrap();
    feed(&netns, &nft, &["-f", "-"], NFTABLES);
    let has_rules = || {
        let tables = netns.run(|| run(Command::new(&nft).args(["list", "tables"]))).success();
        tables.lines().any(|it| it == "table ip kube-proxy")
    };
    // It is recognized by its name, or by its port where its processes are invisible.
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("kube-proxy");
    fs::copy("/bin/sleep", &program).unwrap();
    let process = KilledOnDrop(Command::new(program).arg("600").spawn().unwrap());
    let stderr = cleanup(&netns, &[]).exits_with(1);
    drop(process);
    assert_contains(&stderr, &["a process is named kube-proxy; stop it first, or give --force"]);
    let port = netns.run(|| TcpListener::bind("127.0.0.1:10256").unwrap());
    let stderr = cleanup(&netns, &[]).exits_with(1);
    assert_contains(&stderr, &["another program than this one answers at 127.0.0.1:10256"]);
    assert!(has_rules());
    cleanup(&netns, &["--force"]).success();
    assert!(!has_rules());
    drop(port);
}
