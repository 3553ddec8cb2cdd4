//! Which endpoint each client of a service port had last.
//!
//! Invariant: bounded. Beyond [`MAX_CLIENTS`] the client that was longest without a connection is forgotten.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

/// How many clients of a service port are remembered.
const MAX_CLIENTS: usize = 16_384;

#[derive(Debug, Default)]
pub(crate) struct Affinity(Mutex<HashMap<IpAddr, (SocketAddr, Instant)>>);

impl Affinity {
    /// The last endpoint of a client, unless the time has passed since.
    pub(crate) fn endpoint(&self, client: IpAddr, timeout: Duration) -> Option<SocketAddr> {
        let (endpoint, at) = *self.0.lock().get(&client)?;
        (at.elapsed() < timeout).then_some(endpoint)
    }

    pub(crate) fn chosen(&self, client: IpAddr, endpoint: SocketAddr, timeout: Duration) {
        let (mut clients, now) = (self.0.lock(), Instant::now());
        if clients.len() >= MAX_CLIENTS && !clients.contains_key(&client) {
            clients.retain(|_, (_, at)| now.duration_since(*at) < timeout);
            let oldest = clients.iter().min_by_key(|(_, (_, at))| *at).map(|(client, _)| *client);
            if let Some(oldest) = oldest.filter(|_| clients.len() >= MAX_CLIENTS) {
                clients.remove(&oldest);
            }
        }
        clients.insert(client, (endpoint, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn clients_are_remembered_for_the_timeout_and_bounded() {
        let (affinity, timeout) = (Affinity::default(), Duration::from_secs(60));
        let endpoint: SocketAddr = "10.1.0.1:80".parse().unwrap();
        let client = |it: usize| IpAddr::from(u32::try_from(it).unwrap().to_be_bytes());
        affinity.chosen(client(0), endpoint, timeout);
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(affinity.endpoint(client(0), timeout), Some(endpoint));
        (1..=MAX_CLIENTS).for_each(|it| affinity.chosen(client(it), endpoint, timeout));
        assert_eq!(affinity.endpoint(client(0), timeout), None, "it was longest without a connection");
        assert_eq!(affinity.endpoint(client(1), timeout), Some(endpoint));
        assert_eq!(affinity.0.lock().len(), MAX_CLIENTS);
        tokio::time::advance(timeout).await;
        assert_eq!(affinity.endpoint(client(1), timeout), None);
        affinity.chosen(client(0), endpoint, timeout);
        assert_eq!(affinity.0.lock().len(), 1, "what has expired makes room");
    }
}
