//! States and reports for tests.

use std::{net::SocketAddr, num::NonZeroU16, sync::Arc, time::Duration};

use datapath::{ApplyReport, AttachStatus, ForeignProgram, HookStatus, PortCounts, TableFill};
use model::{
    Protocol, Rejected, ServiceName, Timestamp,
    state::{
        Endpoint, EndpointKey, EndpointPort, NodeState, Scopes, Service, ServicePort, ServiceState,
        TrafficPolicy,
    },
};
use publish::{Published, Publisher};

use reconciler::Observer as _;

use crate::{
    admin::Admin,
    state::{CounterLookup, PortCountLookup, Role},
};

const HTTP: NonZeroU16 = NonZeroU16::new(80).expect("80 is not zero");

/// A Service with one port.
pub(crate) fn service_spec(namespace: &str, name: &str) -> Service {
    Service {
        cluster_ips: vec![[10, 96, 0, 1].into()],
        ports: vec![ServicePort::new(Protocol::Tcp, HTTP)],
        ..Service::new(ServiceName::new(namespace, name))
    }
}

/// The endpoint with this number, on this node.
pub(crate) fn endpoint(n: u8) -> Endpoint {
    Endpoint {
        v4: Some([10, 1, 0, n].into()),
        local: true,
        ports: [EndpointPort {
            index: 0,
            port: HTTP,
            scopes: Scopes { internal: true, ..Scopes::default() },
        }]
        .into(),
        ..Endpoint::new(EndpointKey::Pod(format!("p{n}").into()))
    }
}

/// The Service `default/NAME` with this number of endpoints on this node, and others elsewhere, under an internal policy Local.
pub(crate) fn service(name: &str, endpoints: u8, changed: Option<f64>) -> (ServiceName, Arc<ServiceState>) {
    let mut service = Service { internal_policy: TrafficPolicy::Local, ..service_spec("default", name) };
    service.ports[0].has_any_endpoint.v4 = true;
    let name = service.name.clone();
    let mut state = ServiceState::new(service, (0..endpoints).map(endpoint));
    state.trigger_time = changed.map(|it| Timestamp::from_micros((it * 1e6) as i64));
    (name, Arc::new(state))
}

/// Counters of Services in `default`. Each of their endpoints has all connections.
pub(crate) struct FixedCounts(pub(crate) Vec<(&'static str, PortCounts)>);

impl FixedCounts {
    /// With connections alone.
    pub(crate) fn of(connections: &[(&'static str, u64)]) -> PortCountLookup {
        let counts = |connections| PortCounts { connections, ..PortCounts::default() };
        Box::new(Self(connections.iter().map(|(name, it)| (*name, counts(*it))).collect()))
    }

    fn get(&self, service: &ServiceName) -> PortCounts {
        self.0.iter().find(|(name, _)| **name == *service.name).map(|(_, it)| *it).unwrap_or_default()
    }
}

impl CounterLookup for FixedCounts {
    fn port(&self, service: &ServiceName, _: &str, _: Protocol) -> Option<PortCounts> {
        Some(self.get(service))
    }

    fn endpoint(&self, service: &ServiceName, _: &str, _: Protocol, _: SocketAddr) -> u64 {
        self.get(service).connections
    }

    fn external_connections(&self, service: &Service, _: &ServicePort) -> u64 {
        self.get(&service.name).external_connections
    }
}

/// A node without a state.
pub(crate) fn node() -> (Admin, Publisher) {
    (Admin::new("n1", Role::Backend), Publisher::new("n1"))
}

/// Publishes Services and reports that they are active.
pub(crate) fn apply(
    admin: &Admin,
    publisher: &Publisher,
    services: impl IntoIterator<Item = (ServiceName, Arc<ServiceState>)>,
) {
    let state = published(publisher, services);
    admin.on_dequeued(&state);
    admin.on_applied(&state, &report(), Duration::from_millis(3));
}

pub(crate) fn published(
    publisher: &Publisher,
    services: impl IntoIterator<Item = (ServiceName, Arc<ServiceState>)>,
) -> Arc<Published> {
    let services = services.into_iter().collect();
    publisher.publish(NodeState { services, ..NodeState::default() });
    publisher.current().unwrap()
}

pub(crate) fn attach_status(is_attached: bool) -> AttachStatus {
    let foreign = vec![ForeignProgram { id: 7, name: "cil_sock4_connect".into() }];
    let hook = HookStatus { name: "connect4", program: Some(1), is_attached, foreign };
    AttachStatus { cgroup: "/sys/fs/cgroup".into(), hooks: vec![hook], ..AttachStatus::default() }
}

pub(crate) fn report() -> ApplyReport {
    let rejected = vec![Rejected::not_served("default/a", "for a test")];
    let tables = vec![TableFill { name: "frontends4", entries: 3, capacity: 64 }];
    ApplyReport { rejected, tables, flipped: true, is_full: true, ..ApplyReport::default() }
}
