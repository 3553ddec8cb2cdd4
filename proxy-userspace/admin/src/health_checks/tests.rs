//! Over real sockets.

use std::{
    net::{Ipv4Addr, Ipv6Addr, TcpListener},
    num::NonZeroU16,
    sync::Arc,
};

use model::{
    Protocol,
    state::{Endpoint, EndpointKey, EndpointPort, PerFamily, Scopes, Service, ServiceKind, ServicePort},
};
use publish::Publisher;
use reconciler::Observer as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::*;
use crate::Role;

const HTTP: NonZeroU16 = NonZeroU16::new(80).expect("it is not zero");

/// A Service that is asked for at a port; with endpoints here, and with one elsewhere.
fn service(name: &str, port: u16, here: usize) -> ServiceState {
    let service = Service {
        kind: ServiceKind::LoadBalancer,
        cluster_ips: vec![Ipv4Addr::new(10, 96, 0, 1).into()],
        ports: vec![ServicePort {
            has_any_endpoint: PerFamily { v4: true, v6: false },
            ..ServicePort::new(Protocol::Tcp, HTTP)
        }],
        external_policy: TrafficPolicy::Local,
        health_check_node_port: NonZeroU16::new(port),
        ..Service::new(ServiceName::new("shop", name))
    };
    let endpoint = |n: usize| Endpoint {
        v4: Some(Ipv4Addr::new(10, 244, 0, u8::try_from(n).unwrap())),
        local: n < here,
        ports: vec![EndpointPort {
            index: 0,
            port: HTTP,
            scopes: Scopes { internal: true, external: n < here, cluster: true },
        }],
        ..Endpoint::new(EndpointKey::Pod(format!("{name}-{n}")))
    };
    ServiceState::new(service, (0..=here).map(endpoint))
}

fn state(services: impl IntoIterator<Item = ServiceState>) -> NodeState {
    let mut state = NodeState::default();
    for it in services {
        state.services.insert(it);
    }
    state
}

/// Ports that were free a moment ago.
fn free<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    listeners.map(|it| it.local_addr().unwrap().port())
}

fn start() -> (Admin, Publisher, tokio::task::JoinHandle<()>) {
    let admin = Admin::new("n1", Role::Backend);
    let publisher = Publisher::new("n1");
    let checks = HealthChecks::new(&admin, "n1", NodePortAddresses::All);
    let states = publisher.subscribe();
    let task = tokio::spawn(checks.follow(states));
    (admin, publisher, task)
}

async fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
            Ok(stream) => return stream,
            Err(_) => sleep(Duration::from_millis(1)).await,
        }
    }
}

/// Asks over a connection that stays open.
async fn ask(stream: &mut TcpStream) -> String {
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut answer = vec![0; 4096];
    let length = stream.read(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

/// Asks until somebody says what is expected: what is published takes effect a moment later.
async fn check(port: u16, expect: &[&str]) {
    for _ in 0..10_000 {
        let answer = ask(&mut connect(port).await).await.to_lowercase();
        if expect.iter().all(|it| answer.contains(&it.to_lowercase())) {
            return;
        }
        sleep(Duration::from_millis(1)).await;
    }
    panic!("never {expect:?}");
}

#[tokio::test]
async fn a_load_balancer_is_told_in_kube_proxys_words() {
    let (_admin, publisher, _task) = start();
    let [port] = free();
    publisher.publish(state([service("web", port, 2)]));
    let body =
        r#"{"service":{"namespace":"shop","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}"#;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\n\
                x-load-balancing-endpoint-weight: 2\r\n";
    check(port, &[head, body]).await;
    publisher.publish(state([service("web", port, 0)]));
    check(port, &["HTTP/1.1 503 ", "weight: 0", "\"localEndpoints\":0,\"serviceProxyHealthy\":true"]).await;
}

#[tokio::test]
async fn a_load_balancer_is_told_to_go_elsewhere_while_packets_are_not_served() {
    let (admin, publisher, _task) = start();
    let [port] = free();
    publisher.publish(state([service("web", port, 2)]));
    check(port, &["200 OK"]).await;
    let lacking = Rejected { item: "traffic".into(), reason: "no nftables".into() };
    admin.on_packet_path(Some(&lacking));
    check(port, &["HTTP/1.1 503 ", "\"localEndpoints\":2,\"serviceProxyHealthy\":false"]).await;
    admin.on_packet_path(None);
    check(port, &["200 OK"]).await;
}

#[tokio::test]
async fn a_listener_that_stays_is_not_touched_by_a_change() {
    let (_admin, publisher, _task) = start();
    let [stays, goes, comes] = free();
    publisher.publish(state([service("stays", stays, 1), service("goes", goes, 1)]));
    let mut lasting = connect(stays).await;
    assert!(ask(&mut lasting).await.contains("\"localEndpoints\":1"));
    drop(connect(goes).await);
    publisher.publish(state([service("stays", stays, 3), service("comes", comes, 1)]));
    check(comes, &["200 OK"]).await;
    assert!(ask(&mut lasting).await.contains("\"localEndpoints\":3"));
    while TcpStream::connect((Ipv4Addr::LOCALHOST, goes)).await.is_ok() {
        sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_port_in_use_is_reported_and_had_as_soon_as_it_is_free() {
    let admin = Admin::new("n1", Role::Backend);
    let publisher = Publisher::new("n1");
    let (failed, mut told) = mpsc::channel(4);
    let checks = HealthChecks::new(&admin, "n1", NodePortAddresses::All).tell_of_failures(failed);
    tokio::spawn(checks.follow(publisher.subscribe()));
    let occupied = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap();
    let port = occupied.local_addr().unwrap().port();
    publisher.publish(state([service("web", port, 1)]));
    let rejected = || admin.record().rejected.get(&Stage::HealthChecks).cloned().unwrap_or_default();
    let first = told.recv().await.unwrap();
    assert_eq!((first.service, first.port), (ServiceName::new("shop", "web"), port));
    assert!(first.reason.contains("in use"), "{}", first.reason);
    assert!(
        rejected()[0].to_string().contains(&format!("health checks at 0.0.0.0:{port}: ")),
        "{:?}",
        rejected()
    );
    drop(occupied);
    check(port, &["200 OK"]).await;
    assert_eq!(rejected(), []);
    // It was tried many times meanwhile, and told of once; to lose it again is news again.
    assert!(told.try_recv().is_err());
    publisher.publish(state([]));
    let occupied = loop {
        match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
            Ok(listener) => break listener,
            Err(_) => sleep(Duration::from_millis(1)).await,
        }
    };
    publisher.publish(state([service("web", port, 1)]));
    assert_eq!(told.recv().await.unwrap().port, port);
    drop(occupied);
}

#[test]
fn only_services_that_keep_to_their_node_are_asked_for() {
    let mut it = service("web", 1, 1);
    assert_eq!(check_port(&it), Some(1));
    Arc::make_mut(&mut it.service).external_policy = TrafficPolicy::Cluster;
    assert_eq!(check_port(&it), None);
}

#[test]
fn endpoints_that_are_about_to_go_do_not_count_and_an_address_counts_once() {
    let mut it = service("web", 1, 3);
    assert_eq!(local_endpoints(&it), 3);
    for endpoint in &mut it.endpoints {
        Arc::make_mut(endpoint).serving_terminating = true;
    }
    assert_eq!(local_endpoints(&it), 0);
    let mut it = service("web", 1, 3);
    // One pod serves under two keys, and another one over IPv6 alone.
    Arc::make_mut(&mut it.endpoints[1]).v4 = it.endpoints[0].v4;
    let other = Arc::make_mut(&mut it.endpoints[2]);
    (other.v4, other.v6) = (None, Some(Ipv6Addr::LOCALHOST));
    assert_eq!(local_endpoints(&it), 1);
}

#[tokio::test]
async fn of_two_services_with_one_port_the_first_is_told_of_whichever_comes_and_goes() {
    let admin = Admin::new("n1", Role::Backend);
    let mut checks = HealthChecks::new(&admin, "n1", NodePortAddresses::All);
    let [port, other] = free();
    let told = |checks: &HealthChecks, port| {
        let checks = lock(&checks.shared.checks);
        let (name, count) = checks.get(&port)?.first_key_value()?;
        Some((name.name.to_string(), *count))
    };
    let (a, b) = (|n| service("a", port, n), |n| service("b", port, n));
    checks.update(&state([b(2)]));
    assert_eq!(told(&checks, port), Some(("b".into(), 2)));
    checks.update(&state([a(1), b(3)]));
    assert_eq!(told(&checks, port), Some(("a".into(), 1)));
    checks.update(&state([service("a", other, 1), b(3)]));
    assert_eq!((told(&checks, port), told(&checks, other)), (Some(("b".into(), 3)), Some(("a".into(), 1))));
    checks.update(&state([]));
    assert!(lock(&checks.shared.checks).is_empty() && checks.listeners.is_empty());
}
