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

use backend::ebpf::NodePortAddresses;
use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};
use model::{
    Rejected, ServiceName,
    state::{NodeState, ServiceState, TrafficPolicy},
};
use publish::{Published, Subscription};
use serde::Serialize;
use tokio::{
    task::{AbortHandle, JoinSet},
    time::{sleep, timeout},
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
    admin: Admin,
    node: String,
    which: NodePortAddresses,
    checks: Arc<Mutex<Checks>>,
    listeners: HashMap<SocketAddr, AbortHandle>,
    tasks: JoinSet<()>,
    failing: Failing,
}

/// What is asked for at each port.
type Checks = BTreeMap<u16, Check>;
/// The addresses that cannot be had, and why.
type Failing = Arc<Mutex<BTreeMap<SocketAddr, String>>>;

/// What is told of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Check {
    service: ServiceName,
    local_endpoints: usize,
}

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
        Self {
            admin: admin.clone(),
            node: node.into(),
            which,
            checks: Arc::default(),
            listeners: HashMap::new(),
            tasks: JoinSet::new(),
            failing: Arc::default(),
        }
    }

    /// Follows what is published, until the publisher is gone.
    pub async fn follow(mut self, mut states: Subscription) {
        let mut latest: Option<Arc<Published>> = None;
        loop {
            match timeout(LOOK, states.next()).await {
                Ok(Some(next)) => latest = Some(next),
                Ok(None) => return,
                Err(_) => {}
            }
            if let Some(published) = &latest {
                self.update(&published.state);
            }
        }
    }

    fn update(&mut self, state: &NodeState) {
        let checks = checks(state);
        let addresses = if checks.is_empty() { BTreeSet::new() } else { self.addresses(state) };
        let wanted: BTreeSet<_> = checks
            .keys()
            .flat_map(|port| addresses.iter().map(move |it| SocketAddr::new(*it, *port)))
            .collect();
        *lock(&self.checks) = checks;
        while self.tasks.try_join_next().is_some() {}
        self.listeners.retain(|address, task| {
            let stays = wanted.contains(address);
            if !stays {
                task.abort();
                lock(&self.failing).remove(address);
            }
            stays
        });
        for address in wanted {
            self.listeners.entry(address).or_insert_with(|| {
                let (admin, checks) = (self.admin.clone(), Arc::clone(&self.checks));
                self.tasks.spawn(serve(admin, address, checks, Arc::clone(&self.failing)))
            });
        }
        tell(&self.admin, &self.failing);
    }

    /// Where to listen.
    fn addresses(&self, state: &NodeState) -> BTreeSet<IpAddr> {
        // Without them, the Node object's have to do; the next look tries again.
        let interfaces = backend::interfaces().unwrap_or_default();
        let node = state.nodes.get(self.node.as_str()).cloned().unwrap_or_default();
        // It means all addresses of both families, also where there is no IPv6.
        self.which.own(&node, &interfaces).unwrap_or_else(|| [Ipv4Addr::UNSPECIFIED.into()].into())
    }
}

/// What is to be told, by port; of two Services with one port, the first by name.
fn checks(state: &NodeState) -> Checks {
    let mut checks = Checks::new();
    for (name, it) in &state.services {
        let service = &it.service;
        if let Some(port) = service.health_check_node_port
            && service.external_policy == TrafficPolicy::Local
        {
            let local_endpoints = local_endpoints(it);
            checks.entry(port.get()).or_insert_with(|| Check { service: name.clone(), local_endpoints });
        }
    }
    checks
}

/// How many endpoints on this node may be given traffic from outside.
fn local_endpoints(state: &ServiceState) -> usize {
    state.endpoints.iter().filter(|it| it.local && it.ports.iter().any(|port| port.scopes.external)).count()
}

/// Listens at an address as soon as that can be had, and answers.
async fn serve(admin: Admin, address: SocketAddr, checks: Arc<Mutex<Checks>>, failing: Failing) {
    let mut pause = PAUSE.0;
    let listener = loop {
        match bind(address) {
            Ok(listener) => break listener,
            Err(error) => {
                let text = format!("{error}; {}", remedy(&error));
                let is_news = lock(&failing).insert(address, text.clone()).is_none();
                if is_news {
                    tracing::error!(
                        "the health of Services cannot be told at {address}: {text}; it is tried again"
                    );
                    tell(&admin, &failing);
                }
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    };
    if lock(&failing).remove(&address).is_some() {
        tracing::info!("the health of Services is told at {address} at last");
        tell(&admin, &failing);
    }
    let port = address.port();
    accept(&listener, "health checks", || {
        let (admin, checks) = (admin.clone(), Arc::clone(&checks));
        move |_| {
            let check = lock(&checks).get(&port).cloned();
            let is_healthy = Health::serves_outside(&admin.record(), Moment::now()).is_ok();
            std::future::ready(answer(check.as_ref(), is_healthy))
        }
    })
    .await;
}

fn answer(check: Option<&Check>, is_healthy: bool) -> Response<Full<Bytes>> {
    let Some(Check { service, local_endpoints }) = check else {
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

/// Says which addresses cannot be had.
fn tell(admin: &Admin, failing: &Failing) {
    let rejected: Vec<_> = lock(failing)
        .iter()
        .map(|(address, reason)| Rejected {
            item: format!("health checks at {address}"),
            reason: reason.clone(),
        })
        .collect();
    admin.rejected(Stage::HealthChecks, rejected);
}

#[cfg(test)]
mod tests;
