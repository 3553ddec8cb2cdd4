//! States and reports for tests.

use std::{num::NonZeroU16, sync::Arc};

use datapath::{ApplyReport, AttachStatus, ForeignProgram, HookStatus, TableFill};
use model::{
    Protocol, Rejected, ServiceName, Timestamp,
    state::{
        Endpoint, EndpointKey, EndpointPort, NodeState, Scopes, Service, ServicePort, ServiceState,
        TrafficPolicy,
    },
};
use publish::{Published, Publisher};

/// A Service `default/NAME` with so many endpoints, under an internal policy Local.
pub(crate) fn service(name: &str, endpoints: u8, changed: Option<f64>) -> (ServiceName, Arc<ServiceState>) {
    let http = NonZeroU16::new(80).unwrap();
    let service = Service {
        cluster_ips: vec![[10, 96, 0, 1].into()],
        ports: vec![ServicePort::new(Protocol::Tcp, http)],
        internal_policy: TrafficPolicy::Local,
        ..Service::new(ServiceName::new("default", name))
    };
    let endpoints = (0..endpoints).map(|n| Endpoint {
        v4: Some([10, 1, 0, n].into()),
        local: true,
        ports: vec![EndpointPort {
            index: 0,
            port: http,
            scopes: Scopes { internal: true, ..Scopes::default() },
        }],
        ..Endpoint::new(EndpointKey::Pod(format!("p{n}")))
    });
    let mut state = ServiceState::new(service, endpoints);
    state.trigger_time = changed.map(|it| Timestamp::from_micros((it * 1e6) as i64));
    (ServiceName::new("default", name), Arc::new(state))
}

pub(crate) fn published(
    publisher: &Publisher,
    services: impl IntoIterator<Item = (ServiceName, Arc<ServiceState>)>,
) -> Arc<Published> {
    let services = services.into_iter().collect();
    publisher.publish(NodeState { services, ..NodeState::default() });
    publisher.current().unwrap()
}

pub(crate) fn hooks(in_effect: bool) -> AttachStatus {
    let foreign = vec![ForeignProgram { id: 7, name: "cil_sock4_connect".into() }];
    let hook = HookStatus { name: "connect4", program: Some(1), is_attached: in_effect, foreign };
    AttachStatus { cgroup: "/sys/fs/cgroup".into(), hooks: vec![hook], ..AttachStatus::default() }
}

pub(crate) fn report() -> ApplyReport {
    let rejected = vec![Rejected { item: "default/a".into(), reason: "for a test".into() }];
    let tables = vec![TableFill { name: "frontends4", entries: 3, capacity: 64 }];
    ApplyReport { rejected, tables, flipped: true, is_full: true, ..ApplyReport::default() }
}
