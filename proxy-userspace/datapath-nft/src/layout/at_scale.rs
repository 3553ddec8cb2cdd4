//! States of extreme size: they are laid out in full, conflicts are reported item by item, and removal leaves nothing behind.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU16,
};

use model::{
    Protocol,
    state::{
        Endpoint, EndpointKey, EndpointPort, PerFamily, Scopes, Service, ServicePort, ServiceState,
        TargetPort,
    },
};

use super::*;

fn number(it: u16) -> NonZeroU16 {
    NonZeroU16::new(it).unwrap()
}

/// The n-th address of 10.64.0.0/10.
fn cluster_ip(n: u32) -> IpAddr {
    Ipv4Addr::from(0x0a40_0000 + n).into()
}

/// The n-th address of 11.0.0.0/8.
fn pod(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x0b00_0000 + n)
}

/// A Service `default/s<n>` at port 80, with these external IPs and endpoints.
fn service(
    n: u32,
    external_ips: &[IpAddr],
    pods: impl IntoIterator<Item = (Option<Ipv4Addr>, Option<Ipv6Addr>)>,
) -> ServiceState {
    let service = Service {
        cluster_ips: vec![cluster_ip(n)],
        external_ips: external_ips.to_vec(),
        ports: vec![ServicePort {
            target_port: TargetPort::Number(number(8080)),
            has_any_endpoint: PerFamily { v4: true, v6: false },
            ..ServicePort::new(Protocol::Tcp, number(80))
        }],
        ..Service::new(ServiceName::new("default", format!("s{n}")))
    };
    let scopes = Scopes { internal: true, external: true, cluster: true };
    let endpoint = |(n, (v4, v6))| Endpoint {
        v4,
        v6,
        ports: vec![EndpointPort { index: 0, port: number(8080), scopes }],
        ..Endpoint::new(EndpointKey::Pod(format!("p{n:06}")))
    };
    ServiceState::new(service, (0_u32..).zip(pods).map(endpoint))
}

fn state(services: impl IntoIterator<Item = ServiceState>) -> NodeState {
    NodeState { services: services.into_iter().map(std::sync::Arc::new).collect(), ..NodeState::default() }
}

/// What the kernel has to do for this state: so many elements less, and so many more.
fn take(layout: &mut Layout, state: &NodeState) -> (usize, usize) {
    let Update { changes, .. } = layout.update(state, &[], &mut PreviousSlots::new());
    (changes.delete.len(), changes.add.len())
}

#[test]
fn a_service_of_100_000_endpoints_comes_and_goes() {
    const MANY: u32 = 100_000;
    let of = |pods: std::ops::Range<u32>| {
        // One address twice, one of a family that the Service does not have, and none at all.
        let bad = [(Some(pod(MANY - 1)), None), (None, Some(Ipv6Addr::LOCALHOST)), (None, None)];
        state([service(1, &[], pods.map(|n| (Some(pod(n)), None)).chain(bad))])
    };
    let mut layout = Layout::default();
    // Besides the endpoints: the cluster IP, its frontend, and the selector.
    assert_eq!(take(&mut layout, &of(0..MANY)), (0, MANY as usize + 3));
    // One is removed: another takes its slot and frees its own, and the selector counts one fewer.
    assert_eq!(take(&mut layout, &of(1..MANY)), (3, 2));
    assert_eq!(take(&mut layout, &of(MANY - 1..MANY)).1, 1);
    assert_eq!(layout.elements().len(), 4);
    take(&mut layout, &NodeState::default());
    assert!(layout.elements().is_empty() && layout.selectors().is_empty() && layout.rejected().is_empty());
}

#[test]
fn of_50_000_services_every_conflict_is_listed_and_all_else_is_served() {
    const MANY: u32 = 50_000;
    /// One in so many names another's cluster IP an external IP of its own.
    const THIEVES: u32 = 100;
    let of = |count| {
        let external_ips = |n| if n % THIEVES == 1 { vec![cluster_ip(n - 1)] } else { Vec::new() };
        state((0..count).map(|n| service(n, &external_ips(n), [(Some(pod(n)), None)])))
    };
    let mut layout = Layout::default();
    assert_eq!(take(&mut layout, &of(MANY)), (0, 4 * MANY as usize));
    assert_eq!(layout.services(), MANY as usize);
    let rejected = layout.rejected();
    assert_eq!(rejected.len() as u32, MANY / THIEVES);
    assert!(rejected.iter().all(|it| it.reason.contains("already used as cluster IP by")));
    assert_eq!(take(&mut layout, &of(2)), (4 * (MANY as usize - 2), 0));
    let rejected: Vec<_> = layout.rejected().into_iter().map(|it| it.item).collect();
    assert_eq!(rejected, ["default/s1 external IP 10.64.0.0:80/TCP"]);
}

#[test]
fn of_50_000_services_at_one_address_one_is_served_there() {
    const MANY: u32 = 50_000;
    let shared = IpAddr::from(Ipv4Addr::new(192, 0, 2, 1));
    let of = |numbers: std::ops::Range<u32>| {
        state(numbers.map(|n| service(10_000_000 + n, &[shared], [(Some(pod(n)), None)])))
    };
    let served = |layout: &Layout| {
        let losers = layout.rejected();
        assert_eq!(losers.len(), layout.services() - 1);
        assert!(losers.iter().all(|it| it.item.ends_with("external IP 192.0.2.1:80/TCP")));
        losers.into_iter().next().map(|it| it.reason)
    };
    let mut layout = Layout::default();
    take(&mut layout, &of(0..MANY));
    let winner =
        |n: u32| format!("already used as external IP by default/s{}; change one of them", 10_000_000 + n);
    assert_eq!(served(&layout), Some(winner(0)));
    // The first one goes with its four elements; what leads from the address to its endpoint now leads to the next one's.
    assert_eq!(take(&mut layout, &of(1..MANY)), (4 + 1, 1));
    assert_eq!(served(&layout), Some(winner(1)));
    take(&mut layout, &NodeState::default());
    assert!(layout.elements().is_empty() && layout.selectors().is_empty() && layout.rejected().is_empty());
}
