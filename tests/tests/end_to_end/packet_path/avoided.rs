//! Packets avoid the endpoints to which connections of the node fail.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream},
};

use tests::{EchoServer, Service, TIMEOUT, TestCluster, Transport, eventually, http};

use super::{node::request_by_socket, *};

/// A second address of the pod p2, without a server.
const DEAD: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 12);
/// Ejections that end when a connection succeeds, soon after the endpoint heals.
const SHORT: [&str; 2] = ["--passive-health-ejection-time=1s", "--passive-health-max-ejection-time=1s"];

/// The Service number `n` over TCP and IPv4, with p1 and the dead endpoint.
fn web(n: u8) -> Service {
    let service = Service::new(&format!("web-{n}"), &cluster_ips(n)[..1]);
    service.port("tcp", "TCP", 80, TARGET).load_balancer_ips(&load_balancer_ips(n)[..1])
}

fn with_both(service: Service) -> Service {
    with_p1(service).endpoint("p2", &[DEAD.into()])
}

fn with_p1(service: Service) -> Service {
    service.endpoint("p1", &P1[..1])
}

/// A cluster with a proxy that serves sockets and packets, and with these Services.
fn cluster_or_skip(services: &[Service], arguments: &[&str]) -> Option<RunningCluster> {
    let it = RunningCluster::or_skip("ebpf", services, arguments)?;
    it.pods[1].add_interface_address(&format!("{DEAD}/32"), "eth0").unwrap();
    it.n1.ip(&["route", "add", &format!("{DEAD}/32"), "dev", "p2"]).unwrap();
    Some(it)
}

/// How many of so many requests of the client outside are refused.
fn refused(it: &TestCluster, n: u8, requests: usize) -> usize {
    let frontend = at(load_balancer_ips(n)[0], 80);
    let is_refused = |_: &usize| match TestCluster::request(&it.client, Transport::Tcp, frontend) {
        Ok(_) => false,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => true,
        Err(error) => panic!("{error}"),
    };
    (0..requests).filter(is_refused).count()
}

/// Connects from the node itself until packets to the Service avoid the dead endpoint.
#[track_caller]
fn eject(it: &TestCluster, n: u8, services: &[Service]) {
    let is_avoided = || {
        // Refused or not.
        let _ = request_by_socket(it, Transport::Tcp, internal_frontends(n)[0]);
        is_active(it, services)
    };
    assert!(eventually(TIMEOUT, is_avoided));
}

#[test]
fn packets_avoid_what_the_node_cannot_reach_until_it_can() {
    let Some(it) = cluster_or_skip(&[with_both(web(1))], &SHORT) else { return };
    assert!(refused(&it, 1, 60) > 0);
    eject(&it, 1, &[with_p1(web(1))]);
    assert_eq!(refused(&it, 1, 100), 0);
    let _healed = it.pods[1].run(|| EchoServer::start_showing_source("p2", at(DEAD, TARGET)).unwrap());
    eject(&it, 1, &[with_both(web(1))]);
    let served = |name: &str| {
        let reply = TestCluster::request(&it.client, Transport::Tcp, at(load_balancer_ips(1)[0], 80));
        reply.is_ok_and(|it| it.name == name)
    };
    assert!(eventually(TIMEOUT, || served("p2")) && eventually(TIMEOUT, || served("p1")));
}

/// A pod can make its own connections fail, as with a source that has no route.
#[test]
fn packets_do_not_avoid_what_a_pod_cannot_reach() {
    let Some(mut it) = cluster_or_skip(&[with_both(web(1)), with_both(web(2))], &SHORT) else { return };
    let is_ejected = |cluster: &TestCluster| {
        let series = "kube_proxy_ebpf_endpoint_ejected{namespace=\"default\",service=\"web-1\",port=\"tcp\"}";
        cluster.n1.run(|| http::metric(series)) == Some(1.0)
    };
    let RunningCluster { cluster, agent, .. } = &mut it;
    let result = agent.wait_until(TIMEOUT, || {
        let _inside = cluster.sandbox().enter().unwrap();
        // Refused or not.
        let _ = TestCluster::request(&cluster.pods[0], Transport::Tcp, internal_frontends(1)[0]);
        is_ejected(cluster)
    });
    result.unwrap();
    // What was read later is in effect.
    eject(&it, 2, &[with_both(web(1)), with_p1(web(2))]);
    assert!(refused(&it, 1, 60) > 0);
    assert_eq!(refused(&it, 2, 60), 0);
}

#[test]
fn packets_use_all_endpoints_where_none_works_and_no_more_are_avoided_than_allowed() {
    let most = |percent| web(2).annotation("kube-proxy-ebpf.io/passive-health", percent);
    let dead = web(1).endpoint("p2", &[DEAD.into()]);
    let limited = with_both(most("max-ejected=49%"));
    let services = [dead, limited, with_both(web(3))];
    let Some(it) = cluster_or_skip(&services, &SHORT) else { return };
    for n in [1, 2] {
        for _ in 0..60 {
            // Refused or not.
            let _ = request_by_socket(&it, Transport::Tcp, internal_frontends(n)[0]);
        }
    }
    let [dead, limited, _] = services;
    eject(&it, 3, &[dead, limited, with_p1(web(3))]);
}

#[test]
fn flows_to_an_avoided_endpoint_continue() {
    let Some(mut it) = cluster_or_skip(&[], &SHORT) else { return };
    let listener = it.pods[1].run(|| TcpListener::bind((DEAD, TARGET)).unwrap());
    it.apply(&[web(1).endpoint("p2", &[DEAD.into()])]);
    let mut client = it.client.run(|| TcpStream::connect(at(load_balancer_ips(1)[0], 80)).unwrap());
    let (mut server, _) = listener.accept().unwrap();
    drop(listener);
    it.apply(&[with_both(web(1))]);
    eject(&it, 1, &[with_p1(web(1))]);
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut read = [0; 2];
    client.write_all(b"hi").unwrap();
    server.read_exact(&mut read).unwrap();
    server.write_all(b"yo").unwrap();
    client.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"yo");
}
