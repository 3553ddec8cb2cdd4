//! Health-check node ports: load balancers query here whether this node has an endpoint of a Service.
//!
//! Invariant: a listener that is wanted before and after a change is not touched.
//! Status, body and headers are kube-proxy's (its `pkg/proxy/healthcheck/service_health.go`).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    future::ready,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use datapath::NodePortAddresses;
use hyper::{
    Response, StatusCode,
    header::{CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};
use model::{
    Family, PerFamily, Rejected, ServiceName,
    state::{NodeState, ServiceState, TrafficPolicy},
};
use parking_lot::Mutex;
use publish::Subscription;
use tokio::{
    runtime::Handle,
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::{Instant, timeout_at},
};

use super::Health;
use crate::{
    admin::Admin,
    http::PageGroup,
    http::bind::{bind_remedy, bind_with_retry},
    http::{
        body::{self, PageBody},
        server::{PendingResponse, accept},
    },
    state::{Moment, RejectedBy},
};

/// How often the addresses of this host are read.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Serves the health-check node ports of the Services of a node.
pub struct HealthChecks {
    node: String,
    node_port_addresses: NodePortAddresses,
    /// The addresses of the node's interfaces, as they were last read.
    interfaces: BTreeSet<IpAddr>,
    /// The state that the listeners serve.
    state: NodeState,
    shared: Shared,
    listeners: HashMap<SocketAddr, AbortHandle>,
    tasks: JoinSet<()>,
    runtime: Handle,
}

/// What the tasks of the listeners share.
#[derive(Clone)]
struct Shared {
    admin: Admin,
    checks: Arc<Mutex<Checks>>,
    bind_errors: Arc<Mutex<BindErrors>>,
    bind_failures: Option<mpsc::Sender<BindFailure>>,
}

/// A health-check node port that cannot be bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindFailure {
    pub service: ServiceName,
    pub port: u16,
    /// The error and its remedy.
    pub reason: String,
}

/// By port: the number of local endpoints of each Service with that port, by family. The first Service by name is served.
type Checks = BTreeMap<u16, BTreeMap<ServiceName, PerFamily<usize>>>;
/// The addresses that cannot be bound, with the reason.
type BindErrors = BTreeMap<SocketAddr, String>;

impl HealthChecks {
    /// Serves at those addresses of a node at which its node ports are served, once it runs; on the threads of `runtime`.
    ///
    /// Each port that cannot be bound is sent, once until it is bound. Failures that the channel has no room for are dropped.
    pub fn new(
        admin: &Admin,
        node: impl Into<String>,
        node_port_addresses: NodePortAddresses,
        bind_failures: Option<mpsc::Sender<BindFailure>>,
        runtime: &Handle,
    ) -> Self {
        let shared = Shared {
            admin: admin.clone(),
            checks: Arc::default(),
            bind_errors: Arc::default(),
            bind_failures,
        };
        Self {
            node: node.into(),
            node_port_addresses,
            interfaces: BTreeSet::new(),
            state: NodeState::default(),
            shared,
            listeners: HashMap::new(),
            tasks: JoinSet::new(),
            runtime: runtime.clone(),
        }
    }

    /// Serves the published states, until the publisher is dropped.
    pub async fn run(mut self, mut states: Subscription) {
        let mut next_poll = Instant::now() + POLL_INTERVAL;
        loop {
            match timeout_at(next_poll, states.next()).await {
                Ok(Some(next)) => self.update(&next.state),
                Ok(None) => return,
                Err(_) => {
                    next_poll = Instant::now() + POLL_INTERVAL;
                    self.listen();
                }
            }
        }
    }

    /// Updates the ports to another state; the cost is proportional to the difference.
    fn update(&mut self, state: &NodeState) {
        let mut ports_differ = false;
        {
            let mut checks = self.shared.checks.lock();
            for (name, before, after) in state.diff(&self.state) {
                let (old, new) = (before.and_then(|it| check_port(it)), after.and_then(|it| check_port(it)));
                if let Some(services) = old.and_then(|it| checks.get_mut(&it)) {
                    services.remove(name);
                }
                if let (Some(port), Some(after)) = (new, after) {
                    checks.entry(port).or_default().insert(name.clone(), local_endpoints(after));
                }
                ports_differ |= old != new;
            }
            checks.retain(|_, services| !services.is_empty());
        }
        let nodes_differ = state.nodes != self.state.nodes;
        self.state = state.clone();
        if ports_differ || nodes_differ {
            self.listen();
        }
    }

    /// Starts and stops listeners as the ports and addresses require.
    fn listen(&mut self) {
        let ports: Vec<_> = self.shared.checks.lock().keys().copied().collect();
        let addresses = if ports.is_empty() { BTreeSet::new() } else { self.addresses() };
        let at = |port| addresses.iter().map(move |it| SocketAddr::new(*it, port));
        let wanted: BTreeSet<_> = ports.into_iter().flat_map(at).collect();
        while self.tasks.try_join_next().is_some() {}
        self.listeners.retain(|address, task| {
            let is_wanted = wanted.contains(address);
            if !is_wanted {
                task.abort();
                self.shared.bind_errors.lock().remove(address);
            }
            is_wanted
        });
        for address in wanted {
            let serve = || self.tasks.spawn_on(self.shared.clone().serve(address), &self.runtime);
            self.listeners.entry(address).or_insert_with(serve);
        }
        self.shared.report_bind_errors();
    }

    fn addresses(&mut self) -> BTreeSet<IpAddr> {
        // If they cannot be read, they are as they were until the next poll.
        if let Ok(interfaces) = netlink::host_addresses::read() {
            self.interfaces = interfaces;
        }
        let node = self.state.nodes.get(self.node.as_str()).cloned().unwrap_or_default();
        match &self.node_port_addresses {
            // It stands for all addresses of both families, also without IPv6.
            NodePortAddresses::All => [Ipv4Addr::UNSPECIFIED.into()].into(),
            some => some.of_own(&node, &self.interfaces),
        }
    }
}

/// The health-check node port of a Service, if it is served.
fn check_port(state: &ServiceState) -> Option<u16> {
    let service = &state.service;
    let port = service.health_check_node_port?.get();
    (service.external_policy == TrafficPolicy::Local).then_some(port)
}

/// The number of endpoints on this node that a load balancer should send to. Terminating endpoints still serve, but should
/// get no new traffic (KEP-1669). Addresses are counted, as kube-proxy does (`LocalReadyEndpoints`).
fn local_endpoints(state: &ServiceState) -> PerFamily<usize> {
    let ready = || state.endpoints.iter().filter(|it| it.local && !it.serving_terminating);
    let count = |family| ready().filter_map(|it| it.address(family)).collect::<BTreeSet<_>>().len();
    PerFamily { v4: count(Family::V4), v6: count(Family::V6) }
}

/// Those that count at an address: of its family, as with kube-proxy; at all addresses, of the family that has more.
fn counted_at(ip: IpAddr, endpoints: &PerFamily<usize>) -> usize {
    if ip.is_unspecified() { endpoints.v4.max(endpoints.v6) } else { *endpoints.of(Family::of(ip)) }
}

impl Shared {
    /// Binds an address, with retries, and serves it.
    async fn serve(self, address: SocketAddr) {
        let listener = bind_with_retry(address, |error| {
            self.on_bind_error(address, format!("{error}; {}", bind_remedy(&error)));
        })
        .await;
        if self.bind_errors.lock().remove(&address).is_some() {
            tracing::info!(%address, "serving health checks after failed attempts");
            self.report_bind_errors();
        }
        let (ip, port) = (address.ip(), address.port());
        let connections = self.admin.connections.of(PageGroup::Health).clone();
        let handler = move |_| -> PendingResponse {
            let is_healthy = Health::external(&self.admin.state(), Moment::now()).is_ok();
            let checks = self.checks.lock();
            let check = checks.get(&port).and_then(|it| it.first_key_value());
            let check = check.map(|(service, endpoints)| (service, counted_at(ip, endpoints)));
            Box::pin(ready(respond(check, is_healthy)))
        };
        accept(&listener, &connections, Arc::new(handler)).await;
    }

    /// Records that an address cannot be bound, and reports the first failure.
    fn on_bind_error(&self, address: SocketAddr, reason: String) {
        let port = address.port();
        let is_first = {
            let mut errors = self.bind_errors.lock();
            let is_first = !errors.keys().any(|it| it.port() == port);
            if errors.insert(address, reason.clone()).is_some() {
                return;
            }
            is_first
        };
        tracing::warn!(%address, error = reason, "cannot serve health checks; retrying, Services are not affected");
        self.report_bind_errors();
        let service = self.checks.lock().get(&port).and_then(|it| it.keys().next().cloned());
        if let (Some(to), Some(service), true) = (&self.bind_failures, service, is_first) {
            // Never blocks: a failure is dropped if the channel is full.
            let _ = to.try_send(BindFailure { service, port, reason });
        }
    }

    /// Passes the addresses that cannot be bound on to the pages.
    fn report_bind_errors(&self) {
        let rejected: Vec<_> = self
            .bind_errors
            .lock()
            .iter()
            .map(|(address, reason)| {
                Rejected::not_served(format!("health checks at {address}"), reason.clone())
            })
            .collect();
        self.admin.set_rejected(RejectedBy::HealthChecks, rejected);
    }
}

fn respond(check: Option<(&ServiceName, usize)>, is_healthy: bool) -> Response<PageBody> {
    let Some((service, local_endpoints)) = check else {
        // The Service is being removed.
        let mut response = Response::new(body::short(""));
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        return response;
    };
    // Names have no characters that would need an escape.
    let ServiceName { namespace, name } = service;
    let text = format!(
        r#"{{"service":{{"namespace":"{namespace}","name":"{name}"}},"localEndpoints":{local_endpoints},"serviceProxyHealthy":{is_healthy}}}"#
    );
    let mut response = Response::new(body::short(text));
    if local_endpoints == 0 || !is_healthy {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    let weight = HeaderName::from_static("x-load-balancing-endpoint-weight");
    headers.insert(weight, HeaderValue::from(local_endpoints));
    response
}

#[cfg(test)]
mod tests;
