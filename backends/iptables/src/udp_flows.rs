//! The flows of UDP that conntrack keeps at endpoints which do not serve them any more.
//!
//! UDP has no end of a connection: a client that goes on sending would have its endpoint forever.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    process::{Output, Stdio},
    sync::Arc,
};

use proxy_contract::{
    backend::{Family, ServedPort},
    localv1::Protocol,
};
use tokio::process::Command;

/// The endpoints that a flow may have, by family, address (`None`: any of the node) and port.
type Served = BTreeMap<(Family, Option<IpAddr>, u16), BTreeSet<SocketAddr>>;

#[derive(Debug, Default)]
pub(crate) struct UdpFlows {
    services: BTreeMap<Arc<str>, Served>,
    /// What changed since flows were deleted.
    changed: Served,
    is_tool_missing: bool,
}

impl UdpFlows {
    /// Takes the ports of a Service; it is looked at even if they are the same if `is_stale`.
    pub(crate) fn update(&mut self, name: &Arc<str>, ports: &[ServedPort], is_stale: bool) {
        let new = served(ports);
        let old = self.services.remove(name).unwrap_or_default();
        if is_stale || old != new {
            for key in old.into_keys() {
                self.changed.entry(key).or_default();
            }
            self.changed.extend(new.clone());
        }
        if !new.is_empty() {
            self.services.insert(Arc::clone(name), new);
        }
    }

    /// Deletes the flows that go elsewhere than they should. What cannot be deleted is logged.
    pub(crate) async fn clean(&mut self) {
        let changed = std::mem::take(&mut self.changed);
        let families: BTreeSet<Family> = changed.keys().map(|(family, ..)| *family).collect();
        for family in families {
            if let Err(error) = clean(family, &changed).await {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(%error, "cannot delete stale UDP flows");
                } else if !self.is_tool_missing {
                    self.is_tool_missing = true;
                    tracing::warn!(
                        "the program `conntrack` is missing: UDP flows stay at removed endpoints until clients \
                         pause; install the package conntrack"
                    );
                }
            }
        }
    }
}

fn served(ports: &[ServedPort]) -> Served {
    let mut served = Served::new();
    for port in ports.iter().filter(|it| it.protocol == Protocol::Udp) {
        let endpoints = [&port.internal, &port.cluster, &port.external, &port.other_serving];
        let endpoints: BTreeSet<SocketAddr> = endpoints.into_iter().flatten().copied().collect();
        for it in &port.frontends {
            served.insert((port.family, it.address.ip(), it.port), endpoints.clone());
        }
    }
    served
}

async fn clean(family: Family, changed: &Served) -> io::Result<()> {
    let flag = if family == Family::V4 { "ipv4" } else { "ipv6" };
    let listed = conntrack(&["-L", "-p", "udp", "-f", flag]).await?;
    let mut deleted = 0;
    for line in String::from_utf8_lossy(&listed.stdout).lines() {
        let Some([source, destination, source_port, port]) = stale(line, family, changed) else { continue };
        let flow = ["-s", source, "-d", destination, "--sport", source_port, "--dport", port];
        // It may have ended by itself.
        conntrack(&[&["-D", "-p", "udp", "-f", flag][..], &flow].concat()).await?;
        deleted += 1;
    }
    if deleted > 0 {
        tracing::info!(deleted, "deleted stale UDP flows");
    }
    Ok(())
}

async fn conntrack(arguments: &[&str]) -> io::Result<Output> {
    Command::new("conntrack").args(arguments).stdin(Stdio::null()).output().await
}

/// Source, destination and their ports of a flow that `conntrack -L` lists, if it goes elsewhere than it should.
fn stale<'a>(line: &'a str, family: Family, changed: &Served) -> Option<[&'a str; 4]> {
    let value = |key: &str, index| {
        line.split(' ').filter_map(|it| it.strip_prefix(key)?.strip_prefix('=')).nth(index)
    };
    let flow = [value("src", 0)?, value("dst", 0)?, value("sport", 0)?, value("dport", 0)?];
    let destination = SocketAddr::new(flow[1].parse().ok()?, flow[3].parse().ok()?);
    let endpoint = SocketAddr::new(value("src", 1)?.parse().ok()?, value("sport", 1)?.parse().ok()?);
    let of_address = changed.get(&(family, Some(destination.ip()), destination.port()));
    // A flow to the same port of another node is answered from there.
    let is_of_node = endpoint != destination || line.contains("[UNREPLIED]");
    let of_node = || changed.get(&(family, None, destination.port())).filter(|_| is_of_node);
    let endpoints = of_address.or_else(of_node)?;
    (!endpoints.contains(&endpoint)).then_some(flow)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_is_stale_if_its_endpoint_does_not_serve_its_frontend() {
        let endpoints = BTreeSet::from(["10.1.0.1:53".parse().unwrap()]);
        let changed = Served::from([
            ((Family::V4, Some([10, 96, 0, 10].into()), 53), endpoints.clone()),
            ((Family::V4, None, 30053), endpoints),
            ((Family::V4, Some([10, 96, 0, 11].into()), 53), BTreeSet::new()),
        ]);
        let cases = [
            // The cluster IP, with its endpoint, a former one, and none: from before it was a frontend.
            ("10.96.0.10 53", "10.1.0.1 53", "", false),
            ("10.96.0.10 53", "10.1.0.2 53", "", true),
            ("10.96.0.10 53", "10.1.0.1 54", "", true),
            ("10.96.0.10 53", "10.96.0.10 53", "[UNREPLIED] ", true),
            ("10.96.0.10 54", "10.1.0.2 53", "", false),
            // A frontend without endpoints, and an address of others.
            ("10.96.0.11 53", "10.1.0.1 53", "", true),
            ("192.0.2.1 53", "192.0.2.1 53", "", false),
            // A node port, and that of another node.
            ("192.0.2.1 30053", "10.1.0.2 53", "", true),
            ("192.0.2.1 30053", "192.0.2.1 30053", "", false),
            ("192.0.2.1 30053", "192.0.2.1 30053", "[UNREPLIED] ", true),
        ];
        for (destination, endpoint, state, expected) in cases {
            let [(ip, port), (endpoint, endpoint_port)] =
                [destination, endpoint].map(|it| it.split_once(' ').unwrap());
            let line = format!(
                "udp      17 29 src=10.0.0.9 dst={ip} sport=999 dport={port} {state}src={endpoint} dst=10.0.0.9 \
                 sport={endpoint_port} dport=999 mark=0 use=1"
            );
            let flow = expected.then_some(["10.0.0.9", ip, "999", port]);
            assert_eq!(stale(&line, Family::V4, &changed), flow, "{line}");
        }
        assert_eq!(stale("conntrack v1.4.7: 3 flow entries have been shown.", Family::V4, &changed), None);
    }
}
