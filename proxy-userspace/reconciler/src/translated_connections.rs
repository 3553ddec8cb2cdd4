//! Finds out when this node has no translated connection of a frontend left whose forwarding has begun.
//!
//! Invariant: what was translated was tracked before forwarding began, so what the first list does not have does not count.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::SocketAddr,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use netlink::conntrack::tcp_connections;

/// Interval between lists.
const INTERVAL: Duration = Duration::from_secs(30);
/// Lists take at most this part of a core.
const SHARE: u32 = 20;

/// The clients of frontends.
type Clients = HashMap<SocketAddr, HashSet<SocketAddr>>;

/// The translated connections of frontends whose forwarding has begun.
#[derive(Debug, Default)]
pub(crate) struct TranslatedConnections {
    /// Those of the first list that every list since has had.
    left: Clients,
    /// The list that is being made on a thread of its own, since it takes as long as there are connections; and how long it took.
    listing: Option<JoinHandle<(Option<Clients>, Duration)>>,
    next: Option<Instant>,
}

impl TranslatedConnections {
    /// The frontends among those that have begun that have none left. To be called every few seconds, and only after forwarding is
    /// in effect.
    pub(crate) fn ended(&mut self, begun: &BTreeSet<SocketAddr>, now: Instant) -> HashSet<SocketAddr> {
        self.left.retain(|it, _| begun.contains(it));
        let mut ended = HashSet::new();
        if let Some(listing) = self.listing.take_if(|it| it.is_finished()) {
            // A panic is reported by its thread; the next list tries again.
            let (found, took) = listing.join().unwrap_or_default();
            self.next = Some(now + INTERVAL.max(took * SHARE));
            ended = found.map(|it| self.listed(it)).unwrap_or_default();
            ended.retain(|it| begun.contains(it));
        }
        let is_new = |it: &SocketAddr| !self.left.contains_key(it) && !ended.contains(it);
        let is_due = begun.iter().any(is_new) || self.next.is_none_or(|it| it <= now);
        if !begun.is_empty() && self.listing.is_none() && is_due {
            let begun = begun.clone();
            self.listing = Some(thread::spawn(move || (list(&begun), now.elapsed())));
        }
        ended
    }

    /// Takes note of a list; returns the frontends without any of the first connections.
    fn listed(&mut self, found: Clients) -> HashSet<SocketAddr> {
        let mut ended = HashSet::new();
        for (frontend, clients) in found {
            let left = self.left.entry(frontend).or_insert_with(|| clients.clone());
            left.retain(|it| clients.contains(it));
            if left.is_empty() {
                self.left.remove(&frontend);
                ended.insert(frontend);
            }
        }
        ended
    }
}

/// The tracked clients of each of these frontends; `None` if the kernel refuses.
fn list(frontends: &BTreeSet<SocketAddr>) -> Option<Clients> {
    let mut clients: Clients = frontends.iter().map(|it| (*it, HashSet::new())).collect();
    let listed = tcp_connections(|destination, client| {
        if let Some(clients) = clients.get_mut(&destination) {
            clients.insert(client);
        }
    });
    if let Err(error) = listed {
        tracing::warn!(%error, "tracked connections cannot be listed: packets of forwarded connections take the longer way");
        return None;
    }
    Some(clients)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn list_of(frontend: &str, clients: &[&str]) -> Clients {
        [(at(frontend), clients.iter().map(|it| at(it)).collect())].into()
    }

    #[test]
    fn a_frontend_ends_with_the_last_connection_of_its_first_list() {
        let mut it = TranslatedConnections::default();
        let (one, two) = ("203.0.113.1:80", "203.0.113.2:80");
        assert_eq!(it.listed(list_of(one, &["198.51.100.1:1", "198.51.100.1:2"])), [].into());
        assert_eq!(it.listed(list_of(two, &[])), [at(two)].into(), "it has had none");
        // A connection that was forwarded here, by another node, does not count.
        assert_eq!(it.listed(list_of(one, &["198.51.100.1:2", "198.51.100.1:3"])), [].into());
        assert_eq!(it.listed(list_of(one, &["198.51.100.1:3"])), [at(one)].into());
        assert_eq!(it.left, Clients::new());
    }

    #[test]
    fn what_begins_is_listed_at_once() {
        let mut it = TranslatedConnections::default();
        let now = Instant::now();
        assert_eq!(it.ended(&BTreeSet::new(), now), [].into());
        assert!(it.listing.is_none(), "nothing has begun");
        let begun = BTreeSet::from([at("203.0.113.1:80")]);
        it.listing = Some(thread::spawn(|| (Some(Clients::new()), Duration::from_secs(3))));
        while !it.listing.as_ref().unwrap().is_finished() {
            thread::yield_now();
        }
        assert_eq!(it.ended(&begun, now), [].into(), "it has begun after the list");
        assert_eq!(it.next, Some(now + Duration::from_secs(60)));
        assert!(it.listing.is_some());
    }
}
