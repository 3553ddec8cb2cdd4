//! The servers at the health-check node ports of Services: whether this node has an endpoint (KEP-1669 included).

use std::{collections::BTreeMap, net::Ipv6Addr};

use hyper::StatusCode;
use tokio::sync::watch;

use super::http::{Answer, Server};
use crate::client::{ServiceEndpoints, State};

/// The open ports, and what they answer now.
#[derive(Debug, Default)]
pub(super) struct HealthChecks(BTreeMap<u16, (watch::Sender<Answer>, Server)>);

impl HealthChecks {
    /// Opens the ports of `state` and closes others. What cannot be opened is logged, and tried again at the next state.
    pub(super) async fn serve(&mut self, state: &State) {
        let wanted: BTreeMap<u16, Answer> =
            state.services.iter().filter_map(|(name, it)| answer(name, it)).collect();
        self.0.retain(|port, _| wanted.contains_key(port));
        for (port, answer) in wanted {
            if let Some((current, _)) = self.0.get(&port) {
                current.send_replace(answer);
                continue;
            }
            let (current, shown) = watch::channel(answer);
            let page = move |_: &str| shown.borrow().clone();
            match Server::start((Ipv6Addr::UNSPECIFIED, port).into(), page).await {
                Ok(server) => drop(self.0.insert(port, (current, server))),
                Err(error) => tracing::warn!(port, %error, "cannot open a health-check node port"),
            }
        }
    }
}

/// The port of a Service, if it has one, and its answer: as kube-proxy's.
fn answer(name: &str, it: &ServiceEndpoints) -> Option<(u16, Answer)> {
    let port = u16::try_from(it.service.health_check_node_port).ok().filter(|it| *it > 0)?;
    let local = it.endpoints.values().filter(|it| it.local && !it.serving_terminating).count();
    let status = if local > 0 { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    // Names of Kubernetes objects need no escapes.
    let (namespace, name) = name.split_once('/').unwrap_or(("", name));
    let body = format!(
        "{{\"service\":{{\"namespace\":\"{namespace}\",\"name\":\"{name}\"}},\"localEndpoints\":{local},\
         \"serviceProxyHealthy\":true}}\n"
    );
    Some((port, Answer { status, content_type: "application/json", body }))
}
