//! `trace` on the packet path: the first packet of each connection to what is asked for, and why one fails.

use std::net::{IpAddr, SocketAddr};

use serde_json::Value;
use tests::{TIMEOUT, TestCluster, Trace, Transport, eventually};

use super::*;

#[track_caller]
fn trace(it: &RunningCluster, arguments: &[&str]) -> Trace {
    it.n1.run(|| Trace::start(it.cli("trace").args(arguments)))
}

fn endpoint_of(pod: &str, address: SocketAddr) -> String {
    let ips = if pod == "p1" { P1 } else { P3 };
    at(ips[usize::from(address.is_ipv6())], TARGET).to_string()
}

fn ip_of(socket: &Value) -> IpAddr {
    socket.as_str().unwrap().parse::<SocketAddr>().unwrap().ip()
}

#[test]
fn each_connection_from_outside_is_traced_with_its_endpoint() {
    let services = [on_both_nodes(external("web", 1)), on_both_nodes(external("other", 2))];
    RunningCluster::each(&services, &[], |it| {
        let trace = trace(&it, &["--service", "default/web", "-v"]);
        for frontend in external_frontends(1) {
            // Another Service is not traced.
            server(&it.client, external_frontends(2)[0]);
            let pod = server(&it.client, frontend);
            let line = trace.expect(&[
                ("event", "packet"),
                ("destination", &frontend.to_string()),
                ("verdict", "redirected"),
                ("endpoint", &endpoint_of(&pod, frontend)),
                ("service", "default/web"),
                ("port", "tcp"),
                ("protocol", "TCP"),
                ("interface", "eth0"),
            ]);
            assert_eq!(ip_of(&line["source"]), CLIENT[usize::from(frontend.is_ipv6())], "{line}");
            assert!(line["masqueraded"].is_string(), "{line}");
            assert!(line["steps"].to_string().contains("kube-proxy-ebpf services"), "{line}");
        }
    });
}

#[test]
fn why_a_packet_fails_is_traced() {
    let services = [
        external("empty", 1),
        external("local", 2).endpoint_on("n2", "p3", &P3).external_local(),
        on_both_nodes(external("restricted", 3)).source_ranges(&["10.244.1.0/24", "fd00:244:1::/64"]),
        on_both_nodes(external("web", 4)),
    ];
    let Some(it) = RunningCluster::or_skip("ebpf", &services, &[]) else { return };
    for family in 0..2 {
        let traced = |n: u8| {
            let frontend = at(load_balancer_ips(n)[family], 80);
            (trace(&it, &["--to", &frontend.to_string(), "--failed"]), frontend)
        };
        let (refused, frontend) = traced(1);
        check_refused(&it.client, frontend);
        refused.expect(&[("verdict", "noEndpoints"), ("service", "default/empty")]);
        drop(refused);
        for (n, reason) in [(2, "traffic policy"), (3, "loadBalancerSourceRanges")] {
            let (dropped, frontend) = traced(n);
            check_dropped(&it.client, frontend);
            let line = dropped.expect(&[("verdict", "dropped"), ("table", "kube-proxy-ebpf")]);
            assert!(line["reason"].to_string().contains(reason), "{line}");
        }
    }
    // A cluster IP without the port.
    let frontend = at(cluster_ips(4)[0], 81);
    let refused = trace(&it, &["--to", &frontend.to_string(), "--failed"]);
    check_refused(&it.client, frontend);
    refused.expect(&[("verdict", "noPort"), ("destination", &frontend.to_string())]);
    drop(refused);
    // What others drop is named, with the endpoint that it was sent to.
    let chain = "chain forward { type filter hook forward priority 0; policy drop; };";
    nft(&it, &[&format!("table inet firewall {{ {chain} }}")]);
    let frontend = at(load_balancer_ips(4)[0], 80);
    let trace = trace(&it, &["--to", &frontend.ip().to_string(), "--failed"]);
    TestCluster::request_unanswered(&it.client, Transport::Udp, frontend).unwrap_err();
    let expect = [("verdict", "dropped"), ("table", "firewall"), ("chain", "forward"), ("port", "udp")];
    let line = trace.expect(&expect);
    assert!(line["endpoint"].is_string(), "{line}");
}

#[test]
fn a_trace_of_packets_leaves_no_rules() {
    let services = [on_both_nodes(external("web", 1))];
    RunningCluster::each(&services, &[], |it| {
        let tables = || nft(&it, &["list", "tables"]);
        let before = tables();
        let mut trace = trace(&it, &["--service", "default/web"]);
        assert!(tables().contains("kube-proxy-ebpf-trace"), "{}", tables());
        trace.kill();
        assert!(eventually(TIMEOUT, || tables() == before), "{}", tables());
    });
}
