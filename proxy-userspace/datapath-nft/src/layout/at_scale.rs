//! States of extreme size: they are laid out in full, and removal leaves nothing behind.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
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

/// The n-th address of 11.0.0.0/8.
fn pod(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x0b00_0000 + n)
}

/// A Service at port 80 with endpoints of these addresses.
fn state(pods: impl IntoIterator<Item = (Option<Ipv4Addr>, Option<Ipv6Addr>)>) -> NodeState {
    let service = Service {
        cluster_ips: vec![[10, 96, 0, 1].into()],
        ports: vec![ServicePort {
            target_port: TargetPort::Number(number(8080)),
            has_any_endpoint: PerFamily { v4: true, v6: false },
            ..ServicePort::new(Protocol::Tcp, number(80))
        }],
        ..Service::new(ServiceName::new("default", "service"))
    };
    let scopes = Scopes { internal: true, external: true, cluster: true };
    let endpoint = |(n, (v4, v6))| Endpoint {
        v4,
        v6,
        ports: vec![EndpointPort { index: 0, port: number(8080), scopes }],
        ..Endpoint::new(EndpointKey::Pod(format!("p{n:06}")))
    };
    let mut state = NodeState::default();
    state.services.insert(ServiceState::new(service, (0_u32..).zip(pods).map(endpoint)));
    state
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
        state(pods.map(|n| (Some(pod(n)), None)).chain(bad))
    };
    let mut layout = Layout::default();
    // Besides the endpoints: the cluster IP, its frontend, the number of its selector, and the selector.
    assert_eq!(take(&mut layout, &of(0..MANY)), (0, MANY as usize + 4));
    // One is removed: another takes its slot and frees its own, and there is another selector.
    assert_eq!(take(&mut layout, &of(1..MANY)), (4, 3));
    assert_eq!(take(&mut layout, &of(MANY - 1..MANY)).1, 2);
    assert_eq!(layout.elements().len(), 5);
    take(&mut layout, &NodeState::default());
    assert!(layout.elements().is_empty() && layout.rejected().is_empty());
}
