//! States of extreme size: everything valid in them is served, and what is removed leaves nothing behind.

use std::net::{Ipv4Addr, Ipv6Addr};

use model::state::Endpoint;

use super::*;
use crate::fixtures::{ALL_SCOPES, number, port};

const CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);

/// A Service without endpoints.
fn service(ports: Vec<ServicePort>) -> Service {
    fixtures::service("service", [CLUSTER_IP.into()], ports)
}

/// The n-th address of 11.0.0.0/8.
fn pod(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x0b00_0000 + n)
}

/// An endpoint that serves these ports of its Service at 8080.
fn endpoint(n: u32, v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>, ports: u16) -> Endpoint {
    let ports = (0..ports).map(|index| EndpointPort { index, port: number(8080), scopes: ALL_SCOPES });
    fixtures::endpoint(n, v4, v6, ports)
}

fn apply(buffer: &mut DoubleBuffer<FakeMaps>, state: &NodeState) {
    buffer.apply(state, &NodeAddresses::default()).unwrap();
    buffer.finish().unwrap();
}

/// Each table has so many entries, as many as in the layout.
#[track_caller]
fn assert_rows(buffer: &DoubleBuffer<FakeMaps>, rows: &[(Table, u32)]) {
    for table in Table::ALL {
        let expect = rows.iter().find(|it| it.0 == table).map_or(0, |it| it.1);
        assert_eq!(buffer.layout.rows(table), expect, "{table}");
    }
    assert_clean(buffer);
}

#[test]
fn a_service_of_100_000_endpoints_is_added_and_removed() {
    const MANY: u32 = 100_000;
    let of = |range: std::ops::Range<u32>| {
        let ports = vec![port("http", Protocol::Tcp, 80), port("dns", Protocol::Udp, 53)];
        let good = range.map(|n| endpoint(n, Some(pod(n)), None, 2));
        // A duplicate address, an address of a family that the Service does not have, and no address.
        let bad = [
            endpoint(MANY, Some(pod(MANY - 1)), None, 2),
            endpoint(MANY + 1, None, Some(Ipv6Addr::LOCALHOST), 2),
            endpoint(MANY + 2, None, None, 2),
        ];
        let mut endpoints: Vec<_> = good.chain(bad).collect();
        endpoints.sort_by(|a, b| a.key.cmp(&b.key));
        state_of([ServiceState::new(service(ports), endpoints)])
    };
    let rows = |count| [(Table::Frontends4, 2), (Table::Backends4, 2 * count), (Table::Members4, count)];
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    apply(&mut buffer, &of(0..MANY));
    assert_rows(&buffer, &rows(MANY));
    let all = buffer.store.backends(tcp(CLUSTER_IP, 80)).unwrap();
    assert!(all.iter().map(SocketAddr::ip).eq((0..MANY).map(|n| IpAddr::from(pod(n)))));
    // One is removed: its slots are filled by the last ones.
    let applied = buffer.apply(&of(1..MANY), &NodeAddresses::default()).unwrap();
    assert!(applied.entries <= 7, "{applied:?}");
    // All but one are removed.
    apply(&mut buffer, &of(MANY - 1..MANY));
    assert_rows(&buffer, &rows(1));
    let last = buffer.store.backends(tcp(CLUSTER_IP, 80)).unwrap();
    assert_eq!(last, [SocketAddr::new(pod(MANY - 1).into(), 8080)]);
    apply(&mut buffer, &NodeState::default());
    assert_rows(&buffer, &[]);
    assert_eq!(buffer.layout.rejected(), []);
}

#[test]
fn a_service_of_20_000_ports_is_served_at_each() {
    // As many as an EndpointSlice may have. Some appear twice, under another name: the first one is served.
    const MANY: u16 = 20_000;
    let ports = || (1..=MANY).map(|it| port(&format!("p{it}"), Protocol::Tcp, it));
    let twice = ports().map(|it| ServicePort { name: format!("{}-again", it.name), ..it });
    let mut service = service(ports().chain(twice.take(1000)).collect());
    service.cluster_ips.push("fd00::1".parse().unwrap());
    let all = endpoint(0, Some(pod(0)), Some(Ipv6Addr::LOCALHOST), MANY);
    let state = state_of([ServiceState::new(service, [all])]);
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    apply(&mut buffer, &state);
    let each = u32::from(MANY);
    assert_rows(
        &buffer,
        &[
            (Table::Frontends4, each),
            (Table::Frontends6, each),
            (Table::Backends4, each),
            (Table::Backends6, each),
        ],
    );
    for port in [1, 2, MANY] {
        let backends = buffer.store.backends(tcp(CLUSTER_IP, port)).unwrap();
        assert_eq!(backends, [SocketAddr::new(pod(0).into(), 8080)]);
    }
    assert_eq!(buffer.layout.rejected().len(), 2000);
}
