//! The packet path beside kube-proxy's rules: which of both decides, while one comes and the other goes.

use std::process::{Command, Stdio};

use build_tools::programs::find;
use tests::{
    EchoConnection, TIMEOUT, TestCluster, Transport,
    agent::run,
    eventually, http,
    load::LoadReport,
    requirements::nft_or_skip,
    skip,
    test_cluster::{P1, P2, TARGET},
};

use super::{RunningCluster, at, external, load_balancer_ips, server, start_load, start_ready};

/// How kube-proxy writes its rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Nftables,
    Iptables(&'static str),
}

impl Mode {
    const ALL: [Self; 3] =
        [Self::Nftables, Self::Iptables("iptables-nft"), Self::Iptables("iptables-legacy")];

    /// Whether this machine has it, in the network namespace of n1.
    fn works(self, it: &TestCluster) -> bool {
        match self {
            Self::Nftables => true,
            Self::Iptables(program) => {
                let program = format!("{program}-restore");
                // An empty input: it only reads what is there.
                let read = || run(Command::new(&program).arg("--noflush").stdin(Stdio::null()));
                find(&program).is_some() && it.n1.run(read).code == Some(0)
            }
        }
    }

    /// Writes rules as kube-proxy has them, for a Service that has p2 as its endpoint.
    fn write(self, it: &TestCluster) {
        let service = load_balancer_ips(1)[0];
        let endpoint = P2[0];
        match self {
            Self::Nftables => script(
                it,
                "nft -f -",
                &format!(
                    "table ip kube-proxy {{
                       map service-ips {{ type ipv4_addr . inet_proto . inet_service : verdict
                         elements = {{ {service} . tcp . 80 : goto external }}; }}
                       chain mark-for-masquerade {{ meta mark set meta mark or 0x4000; }}
                       chain external {{ jump mark-for-masquerade
                         meta l4proto tcp dnat ip to {endpoint}:{TARGET}
                       }}
                       chain services {{ ip daddr . meta l4proto . th dport vmap @service-ips; }}
                       chain nat-prerouting {{ type nat hook prerouting priority -100; jump services; }}
                       chain nat-output {{ type nat hook output priority -100; jump services; }}
                       chain nat-postrouting {{ type nat hook postrouting priority 100;
                         meta mark & 0x4000 == 0 return
                         meta mark set meta mark xor 0x4000
                         masquerade fully-random
                       }}
                     }}"
                ),
            ),
            Self::Iptables(program) => script(
                it,
                &format!("{program}-restore --noflush"),
                &format!(
                    "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-POSTROUTING - [0:0]\n\
                     -A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-A POSTROUTING -j KUBE-POSTROUTING\n\
                     -A KUBE-SERVICES -d {service}/32 -p tcp --dport 80 -j MARK --set-xmark 0x4000/0x4000\n\
                     -A KUBE-SERVICES -d {service}/32 -p tcp --dport 80 -j DNAT --to-destination {endpoint}:{TARGET}\n\
                     -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
                     -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0\n\
                     -A KUBE-POSTROUTING -j MASQUERADE --random-fully\nCOMMIT\n"
                ),
            ),
        }
    }

    fn delete(self, it: &TestCluster) {
        match self {
            Self::Nftables => script(it, "nft -f -", "delete table ip kube-proxy\n"),
            Self::Iptables(program) => script(it, &format!("{program}-restore"), "*nat\nCOMMIT\n"),
        }
    }
}

/// Runs a program on n1 that reads a script.
#[track_caller]
fn script(it: &TestCluster, program: &str, script: &str) {
    use std::io::Write as _;
    let mut words = program.split(' ');
    let mut command = Command::new(words.next().unwrap());
    command.args(words).stdin(Stdio::piped());
    let mut child = it.n1.run(|| command.spawn().unwrap());
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{program}: {script}");
}

#[test]
fn ours_decides_beside_kube_proxy_and_no_connection_fails_when_either_comes_or_goes() {
    if !nft_or_skip() {
        return;
    }
    for mode in Mode::ALL {
        // kube-proxy's rules lead to p2, which lives.
        let web = || external("web", 1).endpoint("p1", &P1);
        let Some(it) = RunningCluster::or_skip("nft", &[web()], &[]) else { return };
        if !mode.works(&it) {
            skip(&format!("{mode:?} does not work on this machine"));
            continue;
        }
        let RunningCluster { agent, cluster: it } = it;
        let frontend = at(load_balancer_ips(1)[0], 80);
        let connect = || it.client.run(|| EchoConnection::connect(frontend).unwrap());
        let mut held = vec![connect()];
        let load = start_load(&it, Transport::Tcp, frontend, 2, 1);
        let mut decides = |name: &str, what: &str| {
            assert!(load.wait_for_new_connects(TIMEOUT), "{mode:?}, {what}: nothing connects");
            let first = load.count();
            assert!(eventually(TIMEOUT, || load.count() > first + 50));
            let report = LoadReport::of(&load.since(0));
            assert_eq!(report.failed, 0, "{mode:?}, {what}: {:?}", report.errors);
            let now = LoadReport::of(&load.since(first)).by_server;
            // Each with the source that it sees: kube-proxy's rules masquerade as ours do.
            let is_from = |it: &String| it.starts_with(&format!("{name} "));
            assert!(!now.is_empty() && now.keys().all(is_from), "{mode:?}, {what}: {now:?}");
            held.push(connect());
            for it in &mut held {
                it.ping().unwrap_or_else(|error| panic!("{mode:?}, {what}: {error}"));
            }
        };
        let is_reported = || it.n1.run(|| http::metric("kube_proxy_ebpf_kube_proxy_rules"));
        let is_seen = mode != Mode::Iptables("iptables-legacy");

        decides("p1", "ours alone");
        mode.write(&it);
        decides("p1", "kube-proxy's come after ours");
        if is_seen {
            assert!(eventually(TIMEOUT * 2, || is_reported() == Some(1.0)), "{mode:?} is not reported");
        }
        // The way back.
        assert!(agent.terminate().unwrap().success());
        decides("p1", "ours is stopped");
        let _ = it.n1.run(|| run(&mut it.cli("cleanup")).success());
        decides("p2", "kube-proxy's alone");
        // The switch-over.
        let agent = start_ready(&it, &it.command("nft"));
        decides("p1", "ours comes after kube-proxy's");
        mode.delete(&it);
        decides("p1", "kube-proxy's are gone");
        assert!(eventually(TIMEOUT * 2, || is_reported() == Some(0.0)), "{mode:?} is still reported");
        assert_eq!(server(&it.client, frontend), "p1");
        drop(agent);
    }
}
