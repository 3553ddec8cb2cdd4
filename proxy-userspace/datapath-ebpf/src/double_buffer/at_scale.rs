//! States of a size that nobody should have, and that somebody will: they are compiled totally, what is wrong in them is
//! listed item by item, and what is taken away leaves nothing behind.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU16,
};

use model::{
    Protocol, ServiceName,
    state::{Endpoint, EndpointKey, EndpointPort, NodeState, Scopes, Service, ServicePort, ServiceState},
};

use super::*;
use crate::{
    compile::{FrontendAddress, Transport},
    fake_maps::Memory,
};

const EVERYTHING: Scopes = Scopes { internal: true, external: true, cluster: true };

fn number(it: u16) -> NonZeroU16 {
    NonZeroU16::new(it).unwrap()
}

fn port(number: NonZeroU16, protocol: Protocol) -> ServicePort {
    ServicePort { name: format!("{protocol}-{number}"), ..ServicePort::new(protocol, number) }
}

/// A Service `default/s<n>` without endpoints, at the n-th address of 10.64.0.0/10.
fn service(n: u32, ports: Vec<ServicePort>) -> Service {
    Service {
        cluster_ips: vec![cluster_ip(n)],
        ports,
        ..Service::new(ServiceName::new("default", format!("s{n}")))
    }
}

fn cluster_ip(n: u32) -> IpAddr {
    Ipv4Addr::from(0x0a40_0000 + n).into()
}

fn tcp(ip: IpAddr, port: u16) -> FrontendAddress {
    FrontendAddress { address: SocketAddr::new(ip, port), transport: Transport::Tcp }
}

/// The n-th address of 11.0.0.0/8.
fn pod(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x0b00_0000 + n)
}

/// An endpoint that serves these ports of its Service at 8080.
fn endpoint(n: u32, v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>, ports: u16) -> Endpoint {
    let ports = (0..ports).map(|index| EndpointPort { index, port: number(8080), scopes: EVERYTHING });
    Endpoint { v4, v6, ports: ports.collect(), ..Endpoint::new(EndpointKey::Pod(format!("p{n}"))) }
}

fn state(services: impl IntoIterator<Item = ServiceState>) -> NodeState {
    NodeState { services: services.into_iter().map(std::sync::Arc::new).collect(), ..NodeState::default() }
}

fn take(plane: &mut Plane<Memory>, state: &NodeState) {
    plane.apply(state, &Places::new()).unwrap();
    plane.settle().unwrap();
    plane.reclaim_counters().unwrap();
}

/// Both sides hold so many rows in a table, and every cell that has an owner is one that a row leads to.
#[track_caller]
fn holds(plane: &Plane<Memory>, rows: &[(Table, u32)]) {
    for side in Side::BOTH {
        for table in Table::ALL {
            let expect = rows.iter().find(|it| it.0 == table).map_or(0, |it| it.1);
            assert_eq!(plane.store.rows(side, table), expect, "{table} of side {side}");
        }
        assert_eq!(plane.store.cells(side), plane.store.owned());
    }
}

#[test]
fn a_service_of_100_000_endpoints_comes_and_goes() {
    const MANY: u32 = 100_000;
    let of = |range: std::ops::Range<u32>| {
        let ports = vec![port(number(80), Protocol::Tcp), port(number(53), Protocol::Udp)];
        let good = range.map(|n| endpoint(n, Some(pod(n)), None, 2));
        // The same address under another name, an address of a family that the Service does not have, and none at all.
        let bad = [
            endpoint(MANY, Some(pod(MANY - 1)), None, 2),
            endpoint(MANY + 1, None, Some(Ipv6Addr::LOCALHOST), 2),
            endpoint(MANY + 2, None, None, 2),
        ];
        let mut endpoints: Vec<_> = good.chain(bad).collect();
        endpoints.sort_by(|a, b| a.key.cmp(&b.key));
        state([ServiceState::new(service(1, ports), endpoints)])
    };
    let rows = |count| [(Table::Frontends4, 2), (Table::Backends4, 2 * count), (Table::Members4, count)];
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    take(&mut plane, &of(0..MANY));
    holds(&plane, &rows(MANY));
    let all = plane.store.backends(tcp(cluster_ip(1), 80)).unwrap();
    assert!(all.iter().map(SocketAddr::ip).eq((0..MANY).map(|n| IpAddr::from(pod(n)))));
    // One goes: its slots are filled by the last ones.
    let applied = plane.apply(&of(1..MANY), &Places::new()).unwrap();
    assert!(applied.entries <= 7, "{applied:?}");
    // All but one.
    take(&mut plane, &of(MANY - 1..MANY));
    holds(&plane, &rows(1));
    let last = plane.store.backends(tcp(cluster_ip(1), 80)).unwrap();
    assert_eq!(last, [SocketAddr::new(pod(MANY - 1).into(), 8080)]);
    take(&mut plane, &NodeState::default());
    holds(&plane, &[]);
    assert_eq!(plane.rejected(), []);
}

#[test]
fn of_50_000_services_every_clash_is_listed_and_all_else_is_served() {
    const MANY: u32 = 50_000;
    /// One in so many names another's cluster IP an external IP of its own.
    const THIEVES: u32 = 100;
    let external = IpAddr::from([203, 0, 113, 1]);
    let of = |count| {
        state((0..count).map(|n| {
            let mut service = service(n, vec![port(number(80), Protocol::Tcp)]);
            if n % THIEVES == 1 {
                service.external_ips = vec![cluster_ip(n - 1)];
            }
            // And all of them want the same one.
            service.external_ips.push(external);
            ServiceState::new(service, [endpoint(n, Some(pod(n)), None, 1)])
        }))
    };
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    take(&mut plane, &of(MANY));
    holds(&plane, &[(Table::Frontends4, MANY + 1), (Table::Backends4, MANY)]);
    for n in (0..MANY).step_by(997).chain([MANY - 1]) {
        assert_eq!(
            plane.store.backends(tcp(cluster_ip(n), 80)).unwrap(),
            [SocketAddr::new(pod(n).into(), 8080)]
        );
    }
    assert_eq!(
        plane.store.backends(tcp(external, 80)).unwrap(),
        [SocketAddr::new(pod(0).into(), 8080)],
        "default/s0 is the first by name"
    );
    let rejected = plane.rejected();
    let (thefts, others): (Vec<_>, Vec<_>) =
        rejected.iter().partition(|it| it.reason.contains("'s cluster IP already"));
    assert_eq!(thefts.len() as u32, MANY / THIEVES);
    assert_eq!(others.len() as u32, MANY - 1);
    assert!(others.iter().all(|it| it.reason.starts_with("it is default/s0's external IP already")));

    take(&mut plane, &of(2));
    holds(&plane, &[(Table::Frontends4, 3), (Table::Backends4, 2)]);
    let rejected: Vec<_> = plane.rejected().iter().map(|it| it.item.clone()).collect();
    assert_eq!(
        rejected,
        ["default/s1 external IP 10.64.0.0:80/TCP", "default/s1 external IP 203.0.113.1:80/TCP"]
    );
}

#[test]
fn a_service_of_20_000_ports_is_served_at_each() {
    // As many as an EndpointSlice may have. Some once more, under another name: only the first one counts.
    const MANY: u16 = 20_000;
    let ports = || (1..=MANY).map(|it| port(number(it), Protocol::Tcp));
    let twice = ports().map(|it| ServicePort { name: format!("{}-again", it.name), ..it });
    let mut service = service(1, ports().chain(twice.take(1000)).collect());
    service.cluster_ips.push("fd00::1".parse().unwrap());
    let all = endpoint(0, Some(pod(0)), Some(Ipv6Addr::LOCALHOST), MANY);
    let state = state([ServiceState::new(service, [all])]);
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    take(&mut plane, &state);
    let each = u32::from(MANY);
    holds(
        &plane,
        &[
            (Table::Frontends4, each),
            (Table::Frontends6, each),
            (Table::Backends4, each),
            (Table::Backends6, each),
        ],
    );
    for port in [1, 2, MANY] {
        let backends = plane.store.backends(tcp(cluster_ip(1), port)).unwrap();
        assert_eq!(backends, [SocketAddr::new(pod(0).into(), 8080)]);
    }
    assert_eq!(plane.rejected().len(), 2000);
}
