//! Explains where a connection goes, and why: the rules in their order, and each endpoint with a reason.
//!
//! May know: the cluster state and the rules. Neither the kernel, nor how a question comes here (`explain` of `pipeline`).
//! Invariant: no rule is written twice. The Service's frontends, their owners and the selection of endpoints are those of
//! [`node_state`](crate::node_state); here they are put into words.

mod client;
mod destination;
mod explanation;
mod query;
mod reasons;

use std::sync::Arc;

use crate::{
    NodeView, Options, admission::Admission, candidates::SlicesByPort, select::Others, service::select_for,
};
use model::{Family, FrontendKind, cluster::ClusterState, state::Scope};

use self::{
    destination::{Frontend, Search},
    reasons::Found,
};
pub use self::{
    explanation::{AppliedRule, ClientKind, ExplainedClient, ExplainedEndpoint, Explanation, Verdict},
    query::{InvalidQuery, Query},
};

/// Explains where a connection goes from a node, by the rules that [`node_state`](crate::node_state) applies.
///
/// # Errors
///
/// If the query names something that the cluster does not have, or that is not served at all.
pub fn explain(
    cluster: &ClusterState,
    options: &Options,
    node: &str,
    query: &Query,
) -> Result<Explanation, InvalidQuery> {
    let client = client::find(cluster, node, &query.client)?;
    let admission = &Admission::of(cluster, options);
    let client_addresses = client.addresses.clone();
    let client_addresses = &client_addresses[..];
    let search = Search { cluster, admission, options, node, client: client.kind, client_addresses };
    let (destination, protocol) = search.address(&query.destination)?;
    let explanation = Explanation {
        node: node.into(),
        client,
        destination,
        protocol: protocol.to_string(),
        verdict: Verdict::Untranslated,
        reason: String::new(),
        service: None,
        port: None,
        rules: Vec::new(),
        endpoints: Vec::new(),
    };
    let frontend = match search.frontend(destination, protocol) {
        Ok(frontend) => frontend,
        Err((verdict, reason)) => return Ok(Explanation { verdict, reason, ..explanation }),
    };
    let slices = cluster.slices_of(&frontend.service.name).map(Arc::as_ref).filter(|it| !it.headless);
    let slices: Vec<_> = slices.collect();
    let family = Family::of(destination.ip());
    let Frontend { service, state, port, .. } = &frontend;
    let at = (family, NodeView::new(cluster, node));
    let (candidates, selection) =
        select_for(service, state, &SlicesByPort::new(&slices), *port, Others::default(), at);
    let (service, port) = (service.name.to_string(), state.ports[*port].name.clone());
    let scope = scope(explanation.client.kind, frontend.kind);
    let found = Found { search, frontend, slices, candidates, selection, scope, explanation: &explanation };
    let (verdict, reason) = found.verdict();
    Ok(Explanation {
        verdict,
        reason,
        service: Some(service),
        port: Some(port),
        rules: found.rules(),
        endpoints: found.endpoints(),
        ..explanation
    })
}

/// The kind of traffic that a client's connection to a frontend is. A cluster IP has one policy for all clients.
fn scope(client: ClientKind, frontend: FrontendKind) -> Scope {
    match (frontend, client) {
        (FrontendKind::ClusterIp, _) => Scope::Internal,
        (_, ClientKind::Outside) => Scope::External,
        (_, ClientKind::Node | ClientKind::Pod) => Scope::Cluster,
    }
}
