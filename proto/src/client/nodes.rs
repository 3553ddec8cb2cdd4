//! Lists the clients of brains.

use super::{
    connect::{Address, Client, error_chain, in_time},
    session::Refused,
};
use crate::globalv1::{ListNodesReq, NodeStatus, nodes_client::NodesClient};

/// The clients of all brains; without those of a brain that does not answer, unless none does.
pub(super) async fn list(client: &Client, address: &str) -> Result<Vec<NodeStatus>, Refused> {
    let (mut all, mut failures) = (None, Vec::new());
    for brain in client.addresses().await {
        match of_brain(client, &brain, address).await {
            Ok(nodes) => all.get_or_insert_with(Vec::new).extend(nodes),
            Err(error) => failures.push((brain.to_string(), error)),
        }
    }
    let text =
        || failures.iter().map(|(brain, error)| format!("{brain}: {error}")).collect::<Vec<_>>().join("; ");
    let all = all.ok_or_else(|| Refused(text()))?;
    for (brain, error) in failures {
        tracing::warn!(brain, error, "the clients of this brain are not listed");
    }
    Ok(all)
}

async fn of_brain(client: &Client, brain: &Address, address: &str) -> Result<Vec<NodeStatus>, String> {
    let mut nodes = NodesClient::new(client.connect_to(brain).await?);
    let answer = in_time(nodes.list(ListNodesReq { address: address.to_owned() })).await?;
    let mut items = answer.map_err(|it| error_chain(&it))?.into_inner();
    let mut all = Vec::new();
    while let Some(it) = items.message().await.map_err(|it| error_chain(&it))? {
        all.push(it);
    }
    Ok(all)
}
