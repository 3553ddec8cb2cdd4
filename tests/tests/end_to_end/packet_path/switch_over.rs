//! The packet path beside kube-proxy's rules: which of both decides, while one comes and the other goes.

use std::{
    fmt, fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use build_tools::programs::find;
use tests::{
    EchoConnection, LoadReport, TIMEOUT, TestCluster, Transport, eventually, http, program_or_skip, run, skip,
};

use super::*;
use crate::kube_proxy_rules::feed;

/// How kube-proxy writes its rules.
#[derive(Clone, Copy)]
struct Mode {
    name: &'static str,
    /// Its variant of iptables; `None` for nftables.
    iptables: Option<&'static str>,
    /// With the interface of IPVS beside chains of iptables; the kernels of the tests have no IPVS, so the chains translate.
    is_ipvs: bool,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Mode {
    const ALL: [Self; 3] = [
        Self { name: "nftables", iptables: None, is_ipvs: false },
        Self { name: "iptables-nft", iptables: Some("iptables-nft"), is_ipvs: false },
        Self { name: "iptables-legacy", iptables: Some("iptables-legacy"), is_ipvs: false },
    ];
    const IPVS: Self = Self { name: "IPVS", iptables: Some("iptables-nft"), is_ipvs: true };

    /// The programs that write the rules of iptables, of each family.
    fn restore(self) -> Vec<String> {
        let of_family = |it: &str| [it.to_owned(), it.replace("ip", "ip6")].map(|it| it + "-restore");
        self.iptables.into_iter().flat_map(of_family).collect()
    }

    /// Whether this machine has it, in the network namespace of n1.
    fn works(self, it: &TestCluster) -> bool {
        self.restore().iter().all(|program| {
            // An empty input: it only reads what is there.
            let read = || run(Command::new(program).arg("--noflush").stdin(Stdio::null()));
            find(program).is_some() && it.n1.run(read).code == Some(0)
        })
    }

    /// Writes what kube-proxy has before its rules: chains without rules, which packets pass.
    fn prepare(self, it: &TestCluster) {
        if self.is_ipvs {
            it.n1.ip(&["link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "ipvs-peer"]).unwrap();
        }
        let chains = "*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n";
        for program in self.restore() {
            feed(&it.n1, program.as_ref(), &["--noflush"], chains);
        }
    }

    /// Writes the rules of one family, IPv4 (0) or IPv6 (1), as kube-proxy has them for a Service with p2 as endpoint.
    fn write(self, it: &TestCluster, family: usize) {
        let (service, endpoint) = (load_balancer_ips(1)[family], at(P2[family], TARGET));
        let (ip, kind) = [("ip", "ipv4_addr"), ("ip6", "ipv6_addr")][family];
        let rules = |template: &str| {
            let rules = template.replace("%FAMILY%", ip).replace("%KIND%", kind);
            rules.replace("%SERVICE%", &service.to_string()).replace("%ENDPOINT%", &endpoint.to_string())
        };
        match self.restore().get(family) {
            None => {
                let rules = rules(include_str!("switch_over/kube-proxy.nft"));
                feed(&it.n1, "nft".as_ref(), &["-f", "-"], &rules);
            }
            Some(program) => {
                let rules = rules(include_str!("switch_over/iptables.txt"));
                feed(&it.n1, program.as_ref(), &["--noflush"], &rules);
            }
        }
    }

    /// Deletes the rules for IPv4.
    fn delete(self, it: &TestCluster) {
        match self.restore().first() {
            None => feed(&it.n1, "nft".as_ref(), &["-f", "-"], "delete table ip kube-proxy\n"),
            Some(program) => feed(&it.n1, program.as_ref(), &[], "*nat\nCOMMIT\n"),
        }
    }
}

#[test]
fn ours_decides_beside_kube_proxy_and_no_connection_fails_when_either_comes_or_goes() {
    let Some(_nft) = program_or_skip("nft") else { return };
    for mode in Mode::ALL {
        // kube-proxy's rules lead to p2, which lives.
        let web = || external("web", 1).endpoint("p1", &P1);
        let Some(it) = RunningCluster::or_skip("nft", &[web()], &[]) else { return };
        if !mode.works(&it) {
            skip(&format!("{mode} does not work on this machine"));
            continue;
        }
        let RunningCluster { agent, cluster: it, .. } = it;
        let frontend = at(load_balancer_ips(1)[0], 80);
        let connect = || it.client.run(|| EchoConnection::connect(frontend).unwrap());
        let mut held = vec![connect()];
        let load = start_load(&it, Transport::Tcp, frontend, 2, 1);
        let mut decides = |name: &str, what: &str| {
            assert!(load.wait_for_new_connects(TIMEOUT), "{mode}, {what}: nothing connects");
            let first = load.count();
            assert!(eventually(TIMEOUT, || load.count() > first + 50));
            let report = LoadReport::of(&load.since(0));
            assert_eq!(report.failed, 0, "{mode}, {what}: {:?}", report.errors);
            let now = LoadReport::of(&load.since(first)).by_server;
            // Each with the source that it sees: kube-proxy's rules masquerade as ours do.
            let is_from = |it: &String| it.starts_with(&format!("{name} "));
            assert!(!now.is_empty() && now.keys().all(is_from), "{mode}, {what}: {now:?}");
            held.push(connect());
            for it in &mut held {
                it.ping().unwrap_or_else(|error| panic!("{mode}, {what}: {error}"));
            }
        };
        let is_reported = || it.n1.run(|| http::metric("kube_proxy_ebpf_kube_proxy_rules"));
        let is_seen = mode.iptables != Some("iptables-legacy");

        decides("p1", "ours alone");
        mode.write(&it, 0);
        decides("p1", "kube-proxy's come after ours");
        if is_seen {
            assert!(eventually(TIMEOUT * 2, || is_reported() == Some(1.0)), "{mode} is not reported");
        }
        // The way back.
        assert!(agent.terminate().unwrap().success());
        decides("p1", "ours is stopped");
        it.n1.run(|| run(&mut it.cli("cleanup")).success());
        decides("p2", "kube-proxy's alone");
        // The switch-over.
        let agent = start_ready(&it, &it.command("nft"));
        decides("p1", "ours comes after kube-proxy's");
        mode.delete(&it);
        decides("p1", "kube-proxy's are gone");
        assert!(eventually(TIMEOUT * 2, || is_reported() == Some(0.0)), "{mode} is still reported");
        assert_eq!(server(&it.client, frontend), "p1");
        drop(agent);
    }
}

/// A page of kube-proxy, whose body the test changes.
struct Page(Arc<Mutex<String>>);

impl Page {
    /// Serves a page at loopback of n1, until the test ends.
    fn serve(it: &TestCluster, port: u16, path: &'static str, body: &str) -> Self {
        let content = Arc::new(Mutex::new(body.to_owned()));
        let listener = it.n1.run(|| TcpListener::bind(("127.0.0.1", port)).unwrap());
        let page = Self(Arc::clone(&content));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let head: Vec<_> = lines.take_while(|it| !it.is_empty()).collect();
                let found = head.first().is_some_and(|it| it.split(' ').nth(1) == Some(path));
                let status = if found { "200 OK" } else { "404 Not Found" };
                let _ = write!(stream, "HTTP/1.0 {status}\r\n\r\n{}", content.lock().unwrap());
            }
        });
        page
    }

    fn change(&self, body: &str) {
        body.clone_into(&mut self.0.lock().unwrap());
    }
}

/// The metric that says when kube-proxy last wrote the rules of each family.
fn last_syncs(seconds: [u64; 2]) -> String {
    let sample = |(family, seconds)| {
        format!("kubeproxy_sync_proxy_rules_last_timestamp_seconds{{ip_family=\"{family}\"}} {seconds}\n")
    };
    ["IPv4", "IPv6"].into_iter().zip(seconds).map(sample).collect()
}

#[test]
fn the_way_back_to_a_slow_kube_proxy_loses_nothing() {
    let Some(_nft) = program_or_skip("nft") else { return };
    let modes = Mode::ALL.into_iter().chain([Mode::IPVS]);
    for (mode, backend) in modes.flat_map(|mode| BACKENDS.map(|backend| (mode, backend))) {
        let web = external("web", 1).endpoint("p1", &P1);
        let Some(it) = RunningCluster::or_skip(backend, &[web], &[]) else { return };
        if !mode.works(&it) {
            skip(&format!("{mode} does not work on this machine"));
            continue;
        }
        let RunningCluster { agent, cluster: it, .. } = it;
        let frontends = load_balancer_ips(1).map(|ip| at(ip, 80));
        let loads = frontends.map(|frontend| start_load(&it, Transport::Tcp, frontend, 1, 1));
        let served_by = |name: &str, what: &str| {
            for (load, frontend) in loads.iter().zip(frontends) {
                let first = load.count();
                assert!(eventually(TIMEOUT, || load.count() > first + 20), "{mode}, {what}");
                assert_eq!(server(&it.client, frontend), name, "{mode}, {what}");
            }
        };
        assert!(agent.terminate().unwrap().success());

        let cleanup = |flag: &str, log: Stdio| {
            let mut command = it.cli("cleanup");
            command.arg(flag).stderr(log);
            it.n1.run(|| command.spawn().unwrap())
        };
        // The controller of the DaemonSet has not noticed the node's label yet.
        let given_up = cleanup("--wait-for-kube-proxy=10ms", Stdio::piped()).wait_with_output().unwrap();
        let log = String::from_utf8_lossy(&given_up.stderr);
        assert!(given_up.status.code() == Some(1) && log.contains("nothing was removed"), "{mode}: {log}");
        served_by("p1", "given up");

        let log = it.sandbox().files().join("cleanup.log");
        let mut child = cleanup("--wait-for-kube-proxy", fs::File::create(&log).unwrap().into());
        let mut waits_for = |text: &str| {
            let log = || fs::read_to_string(&log).unwrap();
            let is_logged = eventually(TIMEOUT, || log().contains(text));
            served_by("p1", text);
            let is_waiting = child.try_wait().unwrap().is_none();
            assert!(is_logged && is_waiting, "{mode}, {text}: {}", log());
        };
        waits_for("http://127.0.0.1:10256/healthz: ");
        // kube-proxy's page has status 200 before it has written anything.
        let _health = Page::serve(&it, 10256, "/healthz", "{}");
        waits_for("no rules for IPv4");
        mode.prepare(&it);
        waits_for("no rules for IPv4");
        mode.write(&it, 0);
        waits_for("no rules for IPv6");
        // Rules may be those of an earlier kube-proxy.
        let metrics = Page::serve(&it, 10249, "/metrics", &last_syncs([1, 0]));
        mode.write(&it, 1);
        waits_for("it has not written its rules since its start");
        metrics.change(&last_syncs([1, 1]));

        let status = child.wait().unwrap();
        assert!(status.success(), "{mode}: {}", fs::read_to_string(&log).unwrap());
        served_by("p2", "kube-proxy's alone");
        for load in &loads {
            let report = LoadReport::of(&load.since(0));
            assert_eq!(report.failed, 0, "{mode}, {backend}: {:?}", report.errors);
        }
    }
}
