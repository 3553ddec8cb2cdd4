//! Health-check node ports: where a load balancer asks whether a node has an endpoint of a Service.
//!
//! The one rule: a listener that is wanted before and after a change is not touched.
//! Status, body and headers are kube-proxy's (its `pkg/proxy/healthcheck/service_health.go`).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use datapath::NodePortAddresses;
use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};
use model::{
    Family, Rejected, ServiceName,
    state::{NodeState, ServiceState, TrafficPolicy},
};
use publish::Subscription;
use serde::Serialize;
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout_at},
};

use crate::{
    Admin, Stage,
    health::Health,
    lock,
    record::Moment,
    server::{PAUSE, accept, bind, remedy},
};

/// How often to see whether this host has other addresses.
const LOOK: Duration = Duration::from_secs(5);

/// Serves the health-check node ports of the Services that a node serves.
#[derive(Debug)]
pub struct HealthChecks {
    node: String,
    which: NodePortAddresses,
    /// What is served; what comes next is compared with it.
    state: NodeState,
    shared: Shared,
    listeners: HashMap<SocketAddr, AbortHandle>,
    tasks: JoinSet<()>,
}

/// What those who listen need.
#[derive(Clone, Debug)]
struct Shared {
    admin: Admin,
    checks: Arc<Mutex<Checks>>,
    failing: Arc<Mutex<Failing>>,
    failed: Option<mpsc::Sender<FailedCheck>>,
}

/// A Service whose health-check node port cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedCheck {
    /// The Service.
    pub service: ServiceName,
    /// Its health-check node port.
    pub port: u16,
    /// What is wrong, and what would do.
    pub reason: String,
}

/// What is told at each port: how many endpoints each Service that claims it has here. The first by name is told of.
type Checks = BTreeMap<u16, BTreeMap<ServiceName, usize>>;
/// The addresses that cannot be had, and why.
type Failing = BTreeMap<SocketAddr, String>;

/// The body of an answer.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    service: Name<'a>,
    local_endpoints: usize,
    service_proxy_healthy: bool,
}

#[derive(Debug, Serialize)]
struct Name<'a> {
    namespace: &'a str,
    name: &'a str,
}

impl HealthChecks {
    /// Serves at those addresses of a node where its node ports are served. Nothing is served before it follows.
    pub fn new(admin: &Admin, node: impl Into<String>, which: NodePortAddresses) -> Self {
        let shared =
            Shared { admin: admin.clone(), checks: Arc::default(), failing: Arc::default(), failed: None };
        Self {
            node: node.into(),
            which,
            state: NodeState::default(),
            shared,
            listeners: HashMap::new(),
            tasks: JoinSet::new(),
        }
    }

    /// Tells of each port that cannot be had, once until it is had; where there is no room, nothing is told.
    #[must_use]
    pub fn tell_of_failures(mut self, to: mpsc::Sender<FailedCheck>) -> Self {
        self.shared.failed = Some(to);
        self
    }

    /// Follows what is published, until the publisher is gone.
    pub async fn follow(mut self, mut states: Subscription) {
        let mut next_look = Instant::now() + LOOK;
        loop {
            match timeout_at(next_look, states.next()).await {
                Ok(Some(next)) => self.update(&next.state),
                Ok(None) => return,
                Err(_) => {
                    next_look = Instant::now() + LOOK;
                    self.listen();
                }
            }
        }
    }

    /// Tells of another state; costs what differs.
    fn update(&mut self, state: &NodeState) {
        let mut ports_differ = false;
        {
            let mut checks = lock(&self.shared.checks);
            for (name, before, after) in state.diff(&self.state) {
                let (old, new) = (before.and_then(|it| check_port(it)), after.and_then(|it| check_port(it)));
                if let Some(claims) = old.and_then(|it| checks.get_mut(&it)) {
                    claims.remove(name);
                }
                if let (Some(port), Some(after)) = (new, after) {
                    checks.entry(port).or_default().insert(name.clone(), local_endpoints(after));
                }
                ports_differ |= old != new;
            }
            checks.retain(|_, claims| !claims.is_empty());
        }
        let nodes_differ = state.nodes != self.state.nodes;
        self.state = state.clone();
        if ports_differ || nodes_differ {
            self.listen();
        }
    }

    /// Listens where it should, and nowhere else.
    fn listen(&mut self) {
        let ports: Vec<_> = lock(&self.shared.checks).keys().copied().collect();
        let addresses = if ports.is_empty() { BTreeSet::new() } else { self.addresses() };
        let at = |port| addresses.iter().map(move |it| SocketAddr::new(*it, port));
        let wanted: BTreeSet<_> = ports.into_iter().flat_map(at).collect();
        while self.tasks.try_join_next().is_some() {}
        self.listeners.retain(|address, task| {
            let stays = wanted.contains(address);
            if !stays {
                task.abort();
                lock(&self.shared.failing).remove(address);
            }
            stays
        });
        for address in wanted {
            let serve = || self.tasks.spawn(self.shared.clone().serve(address));
            self.listeners.entry(address).or_insert_with(serve);
        }
        self.shared.tell();
    }

    /// Where to listen.
    fn addresses(&self) -> BTreeSet<IpAddr> {
        // Without them, the Node object's have to do; the next look tries again.
        let interfaces = netlink::host_addresses::read().unwrap_or_default();
        let node = self.state.nodes.get(self.node.as_str()).cloned().unwrap_or_default();
        // It means all addresses of both families, also where there is no IPv6.
        self.which.own(&node, &interfaces).unwrap_or_else(|| [Ipv4Addr::UNSPECIFIED.into()].into())
    }
}

/// Where the health of a Service is asked for, if it is.
fn check_port(state: &ServiceState) -> Option<u16> {
    let service = &state.service;
    let port = service.health_check_node_port?.get();
    (service.external_policy == TrafficPolicy::Local).then_some(port)
}

/// How many endpoints on this node a load balancer should send traffic to: those that are about to go serve what comes,
/// but nothing more should come (KEP-1669). Counted are addresses, as kube-proxy does (`LocalReadyEndpoints`).
fn local_endpoints(state: &ServiceState) -> usize {
    let lasting = || state.endpoints.iter().filter(|it| it.local && !it.serving_terminating);
    let count = |family| lasting().filter_map(|it| it.address(family)).collect::<BTreeSet<_>>().len();
    count(Family::V4).max(count(Family::V6))
}

impl Shared {
    /// Listens at an address as soon as that can be had, and answers.
    async fn serve(self, address: SocketAddr) {
        let mut pause = PAUSE.0;
        let listener = loop {
            match bind(address) {
                Ok(listener) => break listener,
                Err(error) => self.fail(address, format!("{error}; {}", remedy(&error))),
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE.1);
        };
        if lock(&self.failing).remove(&address).is_some() {
            tracing::info!("the health of Services is told at {address} at last");
            self.tell();
        }
        let port = address.port();
        accept(&listener, "health checks", || {
            let shared = self.clone();
            move |_| {
                let is_healthy = Health::serves_outside(&shared.admin.record(), Moment::now()).is_ok();
                let checks = lock(&shared.checks);
                let check = checks.get(&port).and_then(|it| it.first_key_value());
                std::future::ready(answer(check, is_healthy))
            }
        })
        .await;
    }

    /// Notes that an address cannot be had, and says so if that is news.
    fn fail(&self, address: SocketAddr, reason: String) {
        let port = address.port();
        let is_first = {
            let mut failing = lock(&self.failing);
            let is_first = !failing.keys().any(|it| it.port() == port);
            if failing.insert(address, reason.clone()).is_some() {
                return;
            }
            is_first
        };
        tracing::error!("the health of Services cannot be told at {address}: {reason}; it is tried again");
        self.tell();
        let service = lock(&self.checks).get(&port).and_then(|it| it.keys().next().cloned());
        if let (Some(to), Some(service), true) = (&self.failed, service, is_first) {
            // Nobody is waited for.
            let _ = to.try_send(FailedCheck { service, port, reason });
        }
    }

    /// Says which addresses cannot be had.
    fn tell(&self) {
        let rejected: Vec<_> = lock(&self.failing)
            .iter()
            .map(|(address, reason)| Rejected {
                item: format!("health checks at {address}"),
                reason: reason.clone(),
            })
            .collect();
        self.admin.rejected(Stage::HealthChecks, rejected);
    }
}

fn answer(check: Option<(&ServiceName, &usize)>, is_healthy: bool) -> Response<Full<Bytes>> {
    let Some((service, local_endpoints)) = check else {
        // It is just going away.
        let mut response = Response::new(Full::default());
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        return response;
    };
    let body = Body {
        service: Name { namespace: &service.namespace, name: &service.name },
        local_endpoints: *local_endpoints,
        service_proxy_healthy: is_healthy,
    };
    // Text and numbers can always be written.
    let body = serde_json::to_string(&body).unwrap_or_default();
    let mut response = Response::new(Full::new(Bytes::from(body)));
    if *local_endpoints == 0 || !is_healthy {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    let weight = HeaderName::from_static("x-load-balancing-endpoint-weight");
    headers.insert(weight, HeaderValue::from(*local_endpoints));
    response
}

#[cfg(test)]
mod tests;
