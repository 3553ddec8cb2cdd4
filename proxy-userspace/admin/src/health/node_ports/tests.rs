//! With real sockets.

use std::{
    net::{Ipv4Addr, Ipv6Addr, TcpListener},
    num::NonZeroU16,
    sync::Arc,
};

use model::state::{Scopes, Service, ServiceKind};
use publish::Publisher;
use reconciler::Observer as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::*;
use crate::fixtures;

/// A Service with a health-check node port, `local` endpoints on this node and one on another.
fn service(name: &str, port: u16, local: usize) -> ServiceState {
    let service = Service {
        kind: ServiceKind::LoadBalancer,
        external_policy: TrafficPolicy::Local,
        health_check_node_port: NonZeroU16::new(port),
        ..fixtures::service_spec("shop", name)
    };
    let endpoint = |n: usize| {
        let is_local = n < local;
        let mut endpoint = fixtures::endpoint(u8::try_from(n).unwrap());
        endpoint.local = is_local;
        Arc::make_mut(&mut endpoint.ports)[0].scopes =
            Scopes { internal: true, external: is_local, cluster: true };
        endpoint
    };
    ServiceState::new(service, (0..=local).map(endpoint))
}

fn state(services: impl IntoIterator<Item = ServiceState>) -> NodeState {
    NodeState { services: services.into_iter().map(Arc::new).collect(), ..NodeState::default() }
}

fn free<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    listeners.map(|it| it.local_addr().unwrap().port())
}

fn health_checks(admin: &Admin, bind_failures: Option<mpsc::Sender<BindFailure>>) -> HealthChecks {
    HealthChecks::new(admin, "n1", NodePortAddresses::All, bind_failures, &Handle::current())
}

fn start() -> (Admin, Publisher) {
    let (admin, publisher) = fixtures::node();
    tokio::spawn(health_checks(&admin, None).run(publisher.subscribe()));
    (admin, publisher)
}

async fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
            Ok(stream) => return stream,
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

/// Sends a request over a connection that stays open.
async fn query(stream: &mut TcpStream) -> String {
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut response = vec![0; 4096];
    let length = stream.read(&mut response).await.unwrap();
    String::from_utf8_lossy(&response[..length]).into_owned()
}

/// Queries until the response is as expected: a published state takes effect with a delay.
async fn check(port: u16, expect: &[&str]) {
    for _ in 0..10_000 {
        let response = query(&mut connect(port).await).await.to_lowercase();
        if expect.iter().all(|it| response.contains(&it.to_lowercase())) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("no response contains {expect:?}");
}

#[tokio::test]
async fn responses_are_those_of_kube_proxy_and_fail_while_the_packet_path_is_unavailable() {
    let (admin, publisher) = start();
    let [port] = free();
    publisher.publish(state([service("web", port, 2)]));
    let body =
        r#"{"service":{"namespace":"shop","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}"#;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\n\
                x-load-balancing-endpoint-weight: 2\r\n";
    check(port, &[head, body]).await;
    let unavailable = Rejected::not_served("traffic", "no nftables");
    admin.on_packet_path(Some(&unavailable));
    check(port, &["HTTP/1.1 503 ", "\"localEndpoints\":2,\"serviceProxyHealthy\":false"]).await;
    admin.on_packet_path(None);
    check(port, &["200 OK"]).await;
    publisher.publish(state([service("web", port, 0)]));
    check(port, &["HTTP/1.1 503 ", "weight: 0", "\"localEndpoints\":0,\"serviceProxyHealthy\":true"]).await;
}

#[tokio::test]
async fn a_listener_that_is_still_wanted_survives_a_change() {
    let (_admin, publisher) = start();
    let [kept, removed, added] = free();
    publisher.publish(state([service("kept", kept, 1), service("removed", removed, 1)]));
    let mut connection = connect(kept).await;
    assert!(query(&mut connection).await.contains("\"localEndpoints\":1"));
    drop(connect(removed).await);
    publisher.publish(state([service("kept", kept, 3), service("added", added, 1)]));
    check(added, &["200 OK"]).await;
    assert!(query(&mut connection).await.contains("\"localEndpoints\":3"));
    while TcpStream::connect((Ipv4Addr::LOCALHOST, removed)).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_port_in_use_is_reported_and_bound_once_it_is_free() {
    let (admin, publisher) = fixtures::node();
    let (sender, mut failures) = mpsc::channel(4);
    let checks = health_checks(&admin, Some(sender));
    tokio::spawn(checks.run(publisher.subscribe()));
    let occupied = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap();
    let port = occupied.local_addr().unwrap().port();
    publisher.publish(state([service("web", port, 1)]));
    let rejected = || admin.state().rejected.get(&RejectedBy::HealthChecks).cloned().unwrap_or_default();
    let first = failures.recv().await.unwrap();
    assert_eq!((first.service, first.port), (ServiceName::new("shop", "web"), port));
    assert!(first.reason.contains("in use"), "{}", first.reason);
    assert!(
        rejected().iter().next().unwrap().to_string().contains(&format!("health checks at 0.0.0.0:{port}: ")),
        "{:?}",
        rejected()
    );
    drop(occupied);
    check(port, &["200 OK"]).await;
    assert!(rejected().is_empty());
    // The failed attempts were reported once; a failure after a success is reported again.
    assert!(failures.try_recv().is_err());
    publisher.publish(state([]));
    let occupied = loop {
        match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    };
    publisher.publish(state([service("web", port, 1)]));
    assert_eq!(failures.recv().await.unwrap().port, port);
    drop(occupied);
}

#[test]
fn only_services_with_the_external_policy_local_are_checked() {
    let mut it = service("web", 1, 1);
    assert_eq!(check_port(&it), Some(1));
    Arc::make_mut(&mut it.service).external_policy = TrafficPolicy::Cluster;
    assert_eq!(check_port(&it), None);
}

#[test]
fn terminating_endpoints_do_not_count_and_an_address_counts_once() {
    let mut it = service("web", 1, 3);
    assert_eq!(local_endpoints(&it), PerFamily { v4: 3, v6: 0 });
    for endpoint in &mut it.endpoints {
        Arc::make_mut(endpoint).serving_terminating = true;
    }
    assert_eq!(local_endpoints(&it), PerFamily::default());
    let mut it = service("web", 1, 3);
    // One pod has two keys, and another one only an IPv6 address.
    Arc::make_mut(&mut it.endpoints[1]).v4 = it.endpoints[0].v4;
    let other = Arc::make_mut(&mut it.endpoints[2]);
    (other.v4, other.v6) = (None, Some(Ipv6Addr::LOCALHOST));
    assert_eq!(local_endpoints(&it), PerFamily { v4: 1, v6: 1 });
}

#[test]
fn endpoints_count_at_addresses_of_their_family() {
    let only_v4 = PerFamily { v4: 2, v6: 0 };
    let counted = ["192.0.2.1", "fd00::1", "0.0.0.0"].map(|it| counted_at(it.parse().unwrap(), &only_v4));
    assert_eq!(counted, [2, 0, 2]);
}

#[tokio::test]
async fn of_two_services_with_one_port_the_first_by_name_is_served() {
    let (admin, _publisher) = fixtures::node();
    let mut checks = health_checks(&admin, None);
    let [port, other] = free();
    let served = |checks: &HealthChecks, port| {
        let checks = checks.shared.checks.lock();
        let (name, count) = checks.get(&port)?.first_key_value()?;
        Some((name.name.to_string(), count.v4))
    };
    let (a, b) = (|n| service("a", port, n), |n| service("b", port, n));
    checks.update(&state([b(2)]));
    assert_eq!(served(&checks, port), Some(("b".into(), 2)));
    checks.update(&state([a(1), b(3)]));
    assert_eq!(served(&checks, port), Some(("a".into(), 1)));
    checks.update(&state([service("a", other, 1), b(3)]));
    assert_eq!(
        (served(&checks, port), served(&checks, other)),
        (Some(("b".into(), 3)), Some(("a".into(), 1)))
    );
    checks.update(&state([]));
    assert!(checks.shared.checks.lock().is_empty() && checks.listeners.is_empty());
}
