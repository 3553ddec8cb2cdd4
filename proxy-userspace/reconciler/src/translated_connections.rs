//! Finds out when this node has no translated connection of a frontend left whose forwarding has begun.
//!
//! Invariant: what was translated was tracked before forwarding began, so what the first list does not have does not count.
//! One that is closed, or that is not answered by the next list, is not waited for, though the kernel lists it for minutes. It counts
//! again if it is answered later, or the client uses its port again.

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map::Entry},
    io,
    net::SocketAddr,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use netlink::conntrack::{TcpStage, tcp_connections};

/// Interval between lists.
const INTERVAL: Duration = Duration::from_secs(30);
/// Interval between lists while a frontend has not been listed yet.
const FIRST_INTERVAL: Duration = Duration::from_secs(1);
/// Lists take at most this part of a core.
const SHARE: u32 = 20;

/// The clients of frontends, and how far the connection of each is.
type Clients = HashMap<SocketAddr, HashMap<SocketAddr, TcpStage>>;

/// The translated connections of frontends whose forwarding has begun.
#[derive(Debug, Default)]
pub(crate) struct TranslatedConnections {
    /// Those of the first list that every list since has had, and whether they are waited for.
    left: HashMap<SocketAddr, HashMap<SocketAddr, bool>>,
    /// The list that is being made on a thread of its own, since it takes as long as there are connections; and how long it took.
    listing: Option<JoinHandle<(io::Result<Clients>, Duration)>>,
    /// The frontends of that list, unless they have ended and begun again meanwhile.
    listed: BTreeSet<SocketAddr>,
    /// When the last list ended, and how long it took.
    last: Option<(Instant, Duration)>,
    has_failed: bool,
}

impl TranslatedConnections {
    /// The frontends among those that have begun that have none left. To be called every few seconds, and only after forwarding is
    /// in effect.
    pub(crate) fn ended(&mut self, begun: &BTreeSet<SocketAddr>, now: Instant) -> HashSet<SocketAddr> {
        self.left.retain(|it, _| begun.contains(it));
        self.listed.retain(|it| begun.contains(it));
        if let Some(listing) = self.listing.take_if(|it| it.is_finished()) {
            // The next list tries again.
            let panicked = || (Err(io::Error::other("the thread has panicked")), Duration::ZERO);
            let (found, took) = listing.join().unwrap_or_else(|_| panicked());
            self.last = Some((now, took));
            if let Err(error) = &found
                && !self.has_failed
            {
                tracing::warn!(
                    %error,
                    "tracked connections cannot be listed: packets of forwarded connections take the longer way"
                );
            }
            self.has_failed = found.is_err();
            self.take_note(found.unwrap_or_default());
        }
        if !begun.is_empty() && self.listing.is_none() && self.is_due(begun, now) {
            let frontends = begun.clone();
            let list = move || (list(&frontends), now.elapsed());
            // Without a thread, the next call tries again.
            self.listing = thread::Builder::new().name("conntrack".into()).spawn(list).ok();
            self.listed.clone_from(begun);
        }
        let ended = self.left.iter().filter(|(_, clients)| !clients.values().any(|it| *it));
        ended.map(|(frontend, _)| *frontend).collect()
    }

    fn is_due(&self, begun: &BTreeSet<SocketAddr>, now: Instant) -> bool {
        let is_new = !self.has_failed && begun.iter().any(|it| !self.left.contains_key(it));
        let interval = if is_new { FIRST_INTERVAL } else { INTERVAL };
        self.last.is_none_or(|(end, took)| end + interval.max(took * SHARE) <= now)
    }

    fn take_note(&mut self, found: Clients) {
        for (frontend, clients) in found.into_iter().filter(|(it, _)| self.listed.contains(it)) {
            match self.left.entry(frontend) {
                Entry::Vacant(it) => {
                    let waited_for = clients.into_iter().map(|(it, stage)| (it, stage != TcpStage::Closed));
                    it.insert(waited_for.collect());
                }
                Entry::Occupied(mut it) => it.get_mut().retain(|it, is_waited_for| {
                    let stage = clients.get(it);
                    *is_waited_for = stage == Some(&TcpStage::Open);
                    stage.is_some()
                }),
            }
        }
    }
}

/// The tracked clients of each of these frontends.
fn list(frontends: &BTreeSet<SocketAddr>) -> io::Result<Clients> {
    let mut clients: Clients = frontends.iter().map(|it| (*it, HashMap::new())).collect();
    tcp_connections(|it| {
        if let Some(clients) = clients.get_mut(&it.destination) {
            clients.insert(it.client, it.stage);
        }
    })?;
    Ok(clients)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// Takes note of a list of these frontends, with open connections of these clients; returns those that have none left.
    fn take_note(it: &mut TranslatedConnections, lists: &[(&str, &[&str])]) -> HashSet<SocketAddr> {
        let open = |clients: &[&str]| clients.iter().map(|it| (at(it), TcpStage::Open)).collect();
        let clients = lists.iter().map(|(frontend, clients)| (at(frontend), open(clients)));
        it.listed = lists.iter().map(|(frontend, _)| at(frontend)).collect();
        let begun = it.listed.clone();
        it.take_note(clients.collect());
        it.last = Some((Instant::now(), Duration::ZERO));
        it.ended(&begun, Instant::now())
    }

    #[test]
    fn a_frontend_ends_with_the_last_connection_of_its_first_list() {
        let mut it = TranslatedConnections::default();
        let (one, two) = ("203.0.113.1:80", "203.0.113.2:80");
        let [a, b, c] = ["198.51.100.1:1", "198.51.100.1:2", "198.51.100.1:3"];
        assert_eq!(take_note(&mut it, &[(one, &[a, b]), (two, &[])]), [at(two)].into(), "it has had none");
        // Connections that were forwarded here, by another node, do not count.
        assert_eq!(take_note(&mut it, &[(one, &[b, c]), (two, &[c])]), [at(two)].into());
        assert_eq!(take_note(&mut it, &[(one, &[c]), (two, &[c])]), [at(one), at(two)].into());
        assert_eq!(it.ended(&BTreeSet::new(), Instant::now()), [].into());
        assert_eq!(it.left, HashMap::new());
    }

    #[test]
    fn a_connection_that_is_closed_or_not_answered_counts_once_it_is_open() {
        let (frontend, client) = (at("203.0.113.1:80"), at("198.51.100.1:1"));
        let has_ended = |stages: &[TcpStage]| {
            let mut it = TranslatedConnections { listed: [frontend].into(), ..Default::default() };
            for stage in stages {
                it.take_note([(frontend, [(client, *stage)].into())].into());
            }
            it.last = Some((Instant::now(), Duration::ZERO));
            !it.ended(&[frontend].into(), Instant::now()).is_empty()
        };
        let (opening, open, closed) = (TcpStage::Opening, TcpStage::Open, TcpStage::Closed);
        assert!(!has_ended(&[opening]), "it may be answered");
        assert!(has_ended(&[opening, opening]) && has_ended(&[closed]) && has_ended(&[open, closed]));
        assert!(!has_ended(&[opening, opening, open]) && !has_ended(&[closed, open]));
    }

    #[test]
    fn what_begins_is_listed_soon_and_then_now_and_then() {
        let mut it = TranslatedConnections::default();
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let begun = BTreeSet::from([at("203.0.113.1:80")]);
        assert!(it.is_due(&begun, now));
        it.last = Some((now, second / 10));
        assert_eq!(
            [1, 2].map(|n| it.is_due(&begun, now + n * second)),
            [false, true],
            "a twentieth of a core"
        );
        it.left.insert(at("203.0.113.1:80"), HashMap::new());
        assert_eq!([29, 30].map(|n| it.is_due(&begun, now + n * second)), [false, true]);
        it.left.clear();
        it.has_failed = true;
        assert!(!it.is_due(&begun, now + 29 * second));
    }

    #[test]
    fn a_list_from_before_a_frontend_began_again_says_nothing() {
        let mut it = TranslatedConnections::default();
        let begun = BTreeSet::from([at("203.0.113.1:80")]);
        it.listed.clone_from(&begun);
        let found: Clients = [(at("203.0.113.1:80"), HashMap::new())].into();
        it.listing = Some(thread::spawn(move || (Ok(found), Duration::ZERO)));
        it.ended(&BTreeSet::new(), Instant::now());
        while it.listing.as_ref().is_some_and(|it| !it.is_finished()) {
            thread::yield_now();
        }
        assert_eq!(it.ended(&begun, Instant::now()), [].into());
    }
}
