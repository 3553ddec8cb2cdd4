//! `cleanup --kube-proxy` removes what a removed kube-proxy has left in the kernel, and nothing of others.

use std::{
    fs,
    io::Write as _,
    net::TcpListener,
    process::{Command, Stdio},
};

use tests::{
    Build, NetNs,
    agent::{Output, run},
    requirements::nft_or_skip,
    skip::skip,
};

/// What kube-proxy 1.36 writes in iptables mode, each line after a `-`, beside the chains of the kubelet and of network
/// plugins.
const IPTABLES: &str = r#"
*nat
-:KUBE-SERVICES - [0:0]
-:KUBE-NODEPORTS - [0:0]
-:KUBE-POSTROUTING - [0:0]
-:KUBE-MARK-MASQ - [0:0]
-:KUBE-PROXY-CANARY - [0:0]
-:KUBE-SVC-NPX46M4PTMTKRN6Y - [0:0]
-:KUBE-SVL-NPX46M4PTMTKRN6Y - [0:0]
-:KUBE-EXT-NPX46M4PTMTKRN6Y - [0:0]
-:KUBE-FW-NPX46M4PTMTKRN6Y - [0:0]
-:KUBE-SEP-23Y66C2VAJ3WDEMI - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:KUBE-HOSTPORTS - [0:0]
--A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m comment --comment "to -j KUBE-SERVICES of others" -j CNI-HOSTPORT-DNAT
--A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
--A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A POSTROUTING -s 10.244.0.0/16 -j MASQUERADE
--A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "default/kubernetes:https cluster IP" -m tcp --dport 443 -j KUBE-SVC-NPX46M4PTMTKRN6Y
--A KUBE-SERVICES -d 10.96.0.2/32 -p tcp -m tcp --dport 443 -j KUBE-FW-NPX46M4PTMTKRN6Y
--A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
--A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-EXT-NPX46M4PTMTKRN6Y
--A KUBE-FW-NPX46M4PTMTKRN6Y -j KUBE-EXT-NPX46M4PTMTKRN6Y
--A KUBE-EXT-NPX46M4PTMTKRN6Y -j KUBE-MARK-MASQ
--A KUBE-EXT-NPX46M4PTMTKRN6Y -j KUBE-SVL-NPX46M4PTMTKRN6Y
--A KUBE-SVL-NPX46M4PTMTKRN6Y -j KUBE-SVC-NPX46M4PTMTKRN6Y
--A KUBE-SVC-NPX46M4PTMTKRN6Y ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m tcp --dport 443 -j KUBE-MARK-MASQ
--A KUBE-SVC-NPX46M4PTMTKRN6Y -m comment --comment "default/kubernetes:https -> 10.244.0.5:6443" -j KUBE-SEP-23Y66C2VAJ3WDEMI
--A KUBE-SEP-23Y66C2VAJ3WDEMI -s 10.244.0.5/32 -j KUBE-MARK-MASQ
--A KUBE-SEP-23Y66C2VAJ3WDEMI -p tcp -m tcp -j DNAT --to-destination 10.244.0.5:6443
--A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
--A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
--A KUBE-POSTROUTING -j MASQUERADE --random-fully
--A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
-:KUBE-SERVICES - [0:0]
-:KUBE-EXTERNAL-SERVICES - [0:0]
-:KUBE-FORWARD - [0:0]
-:KUBE-NODEPORTS - [0:0]
-:KUBE-PROXY-FIREWALL - [0:0]
-:KUBE-PROXY-CANARY - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-NWPLCY-DEFAULT - [0:0]
:KUBE-POD-FW-ABCDEFGHIJKLMNOP - [0:0]
--A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
--A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT -j KUBE-FIREWALL
--A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
--A FORWARD -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
--A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -j KUBE-POD-FW-ABCDEFGHIJKLMNOP
--A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES
--A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A KUBE-POD-FW-ABCDEFGHIJKLMNOP -j KUBE-NWPLCY-DEFAULT
--A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
--A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
--A KUBE-SERVICES -d 10.96.0.3/32 -p tcp -m tcp --dport 80 -j REJECT
--A KUBE-NODEPORTS -p tcp -m tcp --dport 30999 -j ACCEPT
COMMIT
*mangle
-:KUBE-PROXY-CANARY - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-IPTABLES-HINT - [0:0]
COMMIT
"#;

/// What kube-proxy 1.36 writes in nftables mode, and a table of another program.
const NFTABLES: &str = r#"
table ip kube-proxy {
    map service-ips {
        type ipv4_addr . inet_proto . inet_service : verdict
    }
    chain services {
        ip daddr . meta l4proto . th dport vmap @service-ips
    }
    chain reject-chain {
        reject
    }
    chain nat-prerouting {
        type nat hook prerouting priority -100;
        jump services
    }
    chain filter-forward {
        type filter hook forward priority 0;
        ct state new jump reject-chain
    }
}
table ip6 kube-proxy {
    chain services {
    }
}
table ip kube-proxy-of-others {
    chain services {
    }
}
table inet kube-proxy {
    chain services {
    }
}
"#;

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

/// Whether these programs are installed; the current test is reported as skipped otherwise.
fn are_installed(programs: &[&str]) -> bool {
    let is_missing = |it: &&&str| Command::new(it).arg("--version").output().is_err();
    let missing = programs.iter().find(is_missing);
    if let Some(missing) = missing {
        skip(&format!("{missing} is not installed"));
    }
    missing.is_none()
}

#[test]
fn rules_that_a_removed_kube_proxy_left_are_removed() {
    const PROGRAMS: [(&str, bool); 2] = [("iptables-nft", false), ("ip6tables-nft", true)];
    if !nft_or_skip() || !are_installed(&["iptables-nft-restore", "ip6tables-nft-restore"]) {
        return;
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

    let Output { code, stderr, .. } = cleanup(&left, &[]);
    assert_eq!(code, Some(0), "{stderr}");
    for text in [
        "removed table kube-proxy (nftables)",
        "rules that jump there",
        "(iptables, nft)",
        "removed interface kube-ipvs0",
    ] {
        assert!(stderr.contains(text), "{text} is not in {stderr}");
    }
    for (program, _) in PROGRAMS {
        let program = format!("{program}-save");
        assert_eq!(saved(&left, &program), saved(&clean, &program), "{program}");
    }
    let tables = left.run(|| run(Command::new("nft").args(["list", "tables"]))).success();
    let tables: Vec<_> = tables.lines().filter(|it| it.contains("kube-proxy")).collect();
    assert_eq!(tables, ["table ip kube-proxy-of-others", "table inet kube-proxy"]);
    left.ip(&["link", "show", "kube-ipvs0"]).unwrap_err();
    // Again: nothing to do, and no error.
    let Output { code, stderr, .. } = cleanup(&left, &[]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("nothing to remove"), "{stderr}");
}

#[test]
fn rules_of_legacy_iptables_are_removed() {
    if !are_installed(&["iptables-legacy-restore", "ip6tables-legacy-restore"]) {
        return;
    }
    let [left, clean] = [(), ()].map(|()| NetNs::new().unwrap());
    for (program, is_ipv6) in [("iptables-legacy-restore", false), ("ip6tables-legacy-restore", true)] {
        feed(&left, program, &[], &iptables(true, is_ipv6));
        feed(&clean, program, &[], &iptables(false, is_ipv6));
    }
    // Without the programs, what may remain is named.
    let mut command = Command::new(Build::Product.binary());
    command.args(["cleanup", "--kube-proxy"]).env("PATH", "/nowhere");
    let Output { code, stderr, .. } = left.run(|| run(&mut command));
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("not removed: table nat of iptables (legacy)"), "{stderr}");
    assert!(stderr.contains("`kube-proxy --cleanup`"), "{stderr}");

    let Output { code, stderr, .. } = cleanup(&left, &[]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("removed its chains in table filter (ip6tables, legacy)"), "{stderr}");
    for program in ["iptables-legacy-save", "ip6tables-legacy-save"] {
        assert_eq!(saved(&left, program), saved(&clean, program), "{program}");
    }
}

#[test]
fn rules_of_a_running_kube_proxy_are_kept() {
    if !nft_or_skip() {
        return;
    }
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
    let Output { code, stderr, .. } = cleanup(&netns, &[]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("another program than this one answers at 127.0.0.1:10256"), "{stderr}");
    assert!(has_rules());
    let Output { code, stderr, .. } = cleanup(&netns, &["--force"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!has_rules());
    drop(port);
}
