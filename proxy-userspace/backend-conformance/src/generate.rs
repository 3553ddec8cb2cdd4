//! Services by number, for states of any size.

use std::{net::Ipv4Addr, num::NonZeroU16, sync::Arc};

use model::{
    Protocol, ServiceName,
    state::{
        Endpoint, EndpointKey, EndpointPort, NodeState, PerFamily, Scopes, Service, ServicePort, ServiceState,
    },
};

/// The Service `number`, with endpoints that differ by `version`.
pub(crate) fn service(number: u16, version: u8, endpoints: u8) -> Arc<ServiceState> {
    let [high, low] = number.to_be_bytes();
    named(ServiceName::new("scale", format!("s{number}")), [10, 111, high, low], endpoints, |it| {
        [10, version, low, it]
    })
}

/// A Service that no scenario has, whose only endpoint says which state is applied.
pub(crate) fn marker(number: u16) -> Arc<ServiceState> {
    let [high, low] = number.to_be_bytes();
    named(ServiceName::new("zzz-conformance", "marker"), [198, 18, 0, 1], 1, |_| [198, 19, high, low])
}

fn named(
    name: ServiceName,
    cluster_ip: [u8; 4],
    endpoints: u8,
    address: impl Fn(u8) -> [u8; 4],
) -> Arc<ServiceState> {
    let port = NonZeroU16::new(80).expect("it is not zero");
    let service = Service {
        cluster_ips: vec![Ipv4Addr::from(cluster_ip).into()],
        ports: vec![ServicePort {
            has_any_endpoint: PerFamily { v4: endpoints > 0, v6: false },
            ..ServicePort::new(Protocol::Tcp, port)
        }],
        ..Service::new(name)
    };
    let endpoints = (0..endpoints).map(|it| Endpoint {
        v4: Some(address(it).into()),
        ports: [EndpointPort {
            index: 0,
            port,
            scopes: Scopes { internal: true, external: true, cluster: true },
        }]
        .into(),
        ..Endpoint::new(EndpointKey::Pod(format!("p{it:03}").into()))
    });
    Arc::new(ServiceState::new(service, endpoints))
}

/// The Services from 0 on.
pub(crate) fn state(count: u16, version: u8, endpoints: u8) -> NodeState {
    let services = (0..count).map(|it| service(it, version, endpoints)).collect();
    NodeState { services, ..NodeState::default() }
}
