//! The connected clients of a server, and their limits.
//!
//! Invariant: no client takes the place of another; what is refused is counted.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use listeners::{Connections, Limits, max_open_files};
use metrics::MetricWriter;
use parking_lot::Mutex;
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};
use tokio::time::Instant;

use super::authz::Peer;

/// The limit of all clients: three times the number of nodes of the largest supported cluster.
const MAX_CLIENTS: usize = 16_384;
/// The limit of clients on this host without TLS, over TCP.
const MAX_CLIENTS_OF_ADDRESS: usize = 128;
/// The limit of clients with the same certificate, unless it is on the allow-list.
const MAX_CLIENTS_OF_CERTIFICATE: usize = 8;
/// The limits of pending handshakes. Beyond them, the oldest is closed.
const HANDSHAKES: Limits = Limits { total: 1024, per_source: 64 };
/// After a refused client was logged, further ones are only counted for this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The clients of one or more listeners. Clones share them.
#[derive(Clone, Debug)]
pub struct Clients(Arc<ClientTable>);

#[derive(Debug)]
struct ClientTable {
    max_clients: usize,
    handshakes: Connections,
    open: Mutex<OpenClients>,
}

#[derive(Debug, Default)]
struct OpenClients {
    total: usize,
    /// Of those with a limit.
    by_peer: HashMap<Peer, usize>,
    refused_in_all: u64,
    refused_of_peer: u64,
    last_logged: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientStats {
    pub open: usize,
    /// Pending TLS handshakes.
    pub handshakes: usize,
    /// Clients that were refused because there were too many in all.
    pub refused_in_all: u64,
    /// Clients that were refused because the same peer had too many.
    pub refused_of_peer: u64,
    /// Handshakes that were closed because too many were pending.
    pub closed_handshakes: u64,
}

impl Default for Clients {
    fn default() -> Self {
        Self(Arc::new(ClientTable {
            // The process needs files for other things, too.
            max_clients: MAX_CLIENTS.min(max_open_files() / 2),
            handshakes: Connections::new("gRPC handshakes", HANDSHAKES),
            open: Mutex::default(),
        }))
    }
}

impl Clients {
    pub fn stats(&self) -> ClientStats {
        let ClientTable { open, handshakes, .. } = &*self.0;
        let open = open.lock();
        ClientStats {
            open: open.total,
            handshakes: handshakes.count(),
            refused_in_all: open.refused_in_all,
            refused_of_peer: open.refused_of_peer,
            closed_handshakes: handshakes.closed(),
        }
    }

    pub(crate) fn handshakes(&self) -> &Connections {
        &self.0.handshakes
    }

    /// Admits a client, which is connected until the result is dropped; `None` if there are too many.
    pub(crate) fn admit(&self, peer: Peer) -> Option<Admission> {
        let table = &self.0;
        let (limit, client): (usize, &dyn fmt::Display) = match &peer {
            it if it.is_trusted() => (usize::MAX, &"trusted"),
            Peer::Host => (MAX_CLIENTS_OF_ADDRESS, &"this host without TLS"),
            it => (MAX_CLIENTS_OF_CERTIFICATE, it),
        };
        let open = &mut *table.open.lock();
        let of_peer = open.by_peer.get(&peer).copied().unwrap_or_default();
        let refusal = if of_peer >= limit {
            Some(("Peer", of_peer, &mut open.refused_of_peer))
        } else if open.total >= table.max_clients {
            Some(("Total", open.total, &mut open.refused_in_all))
        } else {
            None
        };
        if let Some((which, connected, refused)) = refusal {
            *refused += 1;
            if open.last_logged.is_none_or(|it| it.elapsed() >= LOG_INTERVAL) {
                open.last_logged = Some(Instant::now());
                tracing::warn!(
                    client = client.to_string(),
                    limit = %which,
                    connected,
                    refused = *refused,
                    "gRPC client refused: limit reached"
                );
            }
            return None;
        }
        open.total += 1;
        if limit != usize::MAX {
            *open.by_peer.entry(peer.clone()).or_default() += 1;
        }
        Some(Admission { table: Arc::clone(table), peer })
    }
}

impl Collector for Clients {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let ClientStats { open, handshakes, refused_in_all, refused_of_peer, closed_handshakes } =
            self.stats();
        let mut out = MetricWriter::own(&mut encoder);
        out.gauge("grpc_connections", open as f64)?;
        out.gauge("grpc_handshakes", handshakes as f64)?;
        let refused = [("all", refused_in_all), ("peer", refused_of_peer), ("handshakes", closed_handshakes)];
        out.counters("grpc_connections_refused", "limit", refused)
    }
}

/// A connected client.
#[derive(Debug)]
pub(crate) struct Admission {
    table: Arc<ClientTable>,
    peer: Peer,
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut open = self.table.open.lock();
        open.total -= 1;
        if let Some(of_peer) = open.by_peer.get_mut(&self.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                open.by_peer.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_limit_in_all() {
        let clients = Clients::default();
        let all: Vec<_> = (0..clients.0.max_clients).map(|_| clients.admit(Peer::Trusted).unwrap()).collect();
        assert!(clients.admit(Peer::Trusted).is_none());
        assert_eq!((clients.stats().open, clients.stats().refused_in_all), (all.len(), 1));
    }
}
