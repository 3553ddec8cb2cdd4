//! Services, endpoints and options for tests.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::{NonZeroU8, NonZeroU16},
    sync::Arc,
    time::Duration,
};

use datapath::PassiveHealthOptions;
use model::{
    Protocol, ServiceName,
    state::{Endpoint, EndpointKey, EndpointPort, NodeState, Scopes, Service, ServicePort, ServiceState},
};

pub(super) const ALL_SCOPES: Scopes = Scopes { internal: true, external: true, cluster: true };

pub(super) fn number(it: u16) -> NonZeroU16 {
    NonZeroU16::new(it).unwrap()
}

/// A port without a node port.
pub(super) fn port(name: &str, protocol: Protocol, port: u16) -> ServicePort {
    ServicePort { name: name.into(), ..ServicePort::new(protocol, number(port)) }
}

/// A Service in the namespace `default`.
pub(super) fn service<const N: usize>(name: &str, ips: [IpAddr; N], ports: Vec<ServicePort>) -> Service {
    Service { cluster_ips: ips.to_vec(), ports, ..Service::new(ServiceName::new("default", name)) }
}

/// The endpoint `p<n>`.
pub(super) fn endpoint(
    n: u32,
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
    ports: impl IntoIterator<Item = EndpointPort>,
) -> Endpoint {
    Endpoint {
        v4,
        v6,
        ports: ports.into_iter().collect(),
        ..Endpoint::new(EndpointKey::Pod(format!("p{n}").into()))
    }
}

pub(super) fn state_of(services: impl IntoIterator<Item = impl Into<Arc<ServiceState>>>) -> NodeState {
    NodeState { services: services.into_iter().map(Into::into).collect(), ..NodeState::default() }
}

/// Endpoints are ejected after so many failures, up to this part of a set, for five seconds to a minute.
pub(super) fn passive_health(failures: u8, max_ejected_percent: u8) -> PassiveHealthOptions {
    PassiveHealthOptions {
        enabled: true,
        failures: NonZeroU8::new(failures).unwrap(),
        max_ejected_percent: NonZeroU8::new(max_ejected_percent).unwrap(),
        ejection_time: Duration::from_secs(5),
        max_ejection_time: Duration::from_secs(60),
    }
}
