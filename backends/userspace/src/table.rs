//! The frontends that new connections use, and what all connections share.

use std::{collections::HashMap, net::IpAddr, sync::Arc, time::Duration};

use ipnet::IpNet;
use parking_lot::{Mutex, RwLock};
use tokio::{sync::Semaphore, time::Instant};

use crate::frontend::{Address, Frontend};

/// How often a warning that clients cause is logged at most.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// How many UDP flows there may be. Each is an open file.
const MAX_UDP_FLOWS: usize = 4096;

/// The active frontends, and what all connections share.
#[derive(Debug)]
pub(crate) struct Table {
    frontends: RwLock<HashMap<Address, Arc<Frontend>>>,
    /// The sources inside the cluster, besides this host.
    inside: Vec<IpNet>,
    pub(crate) udp_flows: Arc<Semaphore>,
    last_warning: Mutex<Option<Instant>>,
}

impl Table {
    pub(crate) fn new(inside: Vec<IpNet>) -> Self {
        Self {
            frontends: RwLock::default(),
            inside,
            udp_flows: Arc::new(Semaphore::new(MAX_UDP_FLOWS)),
            last_warning: Mutex::default(),
        }
    }

    /// Logs a warning that a client causes, unless one was logged a moment ago.
    pub(crate) fn warn(&self, text: impl FnOnce() -> String) {
        let mut last = self.last_warning.lock();
        if last.is_none_or(|it| it.elapsed() >= LOG_INTERVAL) {
            *last = Some(Instant::now());
            tracing::warn!("{}", text());
        }
    }

    /// Replaces frontends, all at the same moment.
    pub(crate) fn replace(&self, edits: Vec<(Address, Option<Arc<Frontend>>)>) {
        let mut frontends = self.frontends.write();
        for (address, frontend) in edits {
            match frontend {
                Some(it) => drop(frontends.insert(address, it)),
                None => drop(frontends.remove(&address)),
            }
        }
    }

    pub(crate) fn get(&self, address: &Address) -> Option<Arc<Frontend>> {
        self.frontends.read().get(address).cloned()
    }

    /// Whether a client is inside: a pod, or this host, whose connections to its own addresses have the same source.
    pub(crate) fn is_inside(&self, client: IpAddr, own: IpAddr) -> bool {
        client.is_loopback() || client == own || self.inside.iter().any(|it| it.contains(&client))
    }
}
