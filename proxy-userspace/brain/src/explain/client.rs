//! The client of a question, as the cluster knows it.

use std::{collections::BTreeMap, net::IpAddr};

use model::cluster::{ClusterState, Endpoint};

use super::{
    explanation::{ClientKind, ExplainedClient},
    query::{Client, InvalidQuery, did_you_mean},
};

pub(super) fn find(
    cluster: &ClusterState,
    node: &str,
    client: &Client,
) -> Result<ExplainedClient, InvalidQuery> {
    let (kind, pod, addresses) = match client {
        Client::Node => (ClientKind::Node, None, node_addresses(cluster, node).to_vec()),
        Client::Outside(address, _) => (ClientKind::Outside, None, address.iter().copied().collect()),
        Client::PodName(namespace, name, given) => {
            let name = format!("{namespace}/{name}");
            let mut pods = BTreeMap::<_, Vec<&Endpoint>>::new();
            for (pod, endpoint) in pods_of(cluster) {
                pods.entry(pod).or_default().push(endpoint);
            }
            // One that the question gives an address, or that has our annotation, is known in any case.
            let is_known = !given.is_empty() || cluster.pods.contains_key(&*name);
            let known = || is_known.then_some(&[][..]);
            let Some(endpoints) = pods.get(&name).map(Vec::as_slice).or_else(known) else {
                let hint = did_you_mean(&name, pods.keys());
                return Err(InvalidQuery(format!(
                    "no endpoint is of a pod {name}; of a pod that is an endpoint of no Service give the address, too, as in \
                     {name}=10.244.1.7, as `kubectl service-proxy explain` does{hint}"
                )));
            };
            is_on(node, &format!("pod {name}"), endpoints)?;
            let mut addresses: Vec<_> = endpoints.iter().map(|it| it.address).chain(given.clone()).collect();
            addresses.sort_unstable();
            addresses.dedup();
            (ClientKind::Pod, Some(name), addresses)
        }
        Client::PodAddress(address) => {
            let found = pods_of(cluster).find(|(_, it)| it.address == *address);
            if let Some((name, endpoint)) = &found {
                is_on(node, &format!("pod {name}"), &[endpoint])?;
            }
            (ClientKind::Pod, found.map(|(name, _)| name), vec![*address])
        }
    };
    // A pod in the node's own network is served as a program of the node.
    let own = node_addresses(cluster, node);
    let is_own = addresses.iter().any(|it| own.contains(it));
    let kind = if kind == ClientKind::Pod && is_own { ClientKind::Node } else { kind };
    Ok(ExplainedClient { kind, pod, addresses })
}

/// The addresses of a node; none if the cluster does not contain it.
pub(super) fn node_addresses<'a>(cluster: &'a ClusterState, node: &str) -> &'a [IpAddr] {
    cluster.nodes.get(node).map(|it| &it.info.addresses[..]).unwrap_or_default()
}

/// The endpoints that are of a pod, with its namespace and name.
fn pods_of(cluster: &ClusterState) -> impl Iterator<Item = (String, &Endpoint)> {
    cluster.slices().flat_map(|slice| {
        let namespace = &slice.name.namespace;
        slice.endpoints.iter().filter_map(move |it| Some((format!("{namespace}/{}", it.pod.as_ref()?), it)))
    })
}

/// Every node decides on its own pods.
fn is_on(node: &str, pod: &str, endpoints: &[&Endpoint]) -> Result<(), InvalidQuery> {
    match endpoints.iter().find_map(|it| it.node.as_deref().filter(|it| *it != node)) {
        Some(other) => Err(InvalidQuery(format!(
            "{pod} runs on node {other}, and this is {node}: ask on that node, or with --source and --node-name {other}"
        ))),
        None => Ok(()),
    }
}
