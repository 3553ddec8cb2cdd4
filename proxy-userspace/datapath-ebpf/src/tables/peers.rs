//! The nodes that packets are forwarded to, as far as they answer probes.
//!
//! Invariant: one lost probe changes nothing, and if no node answers, the fault is this node's: then none is silent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

/// What probes say of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerState {
    /// It has not been asked, or has still time to answer.
    Untried,
    Answers,
    /// It does not answer any more.
    Silent,
    /// It has never answered: it cannot unwrap packets.
    Mute,
}

/// The state of each address of a node that was asked.
pub(crate) type PeerStates = BTreeMap<IpAddr, PeerState>;

/// The nodes that are asked, by address.
#[derive(Debug)]
pub(crate) struct Peers {
    /// How long a probe may remain unanswered, if others follow it.
    patience: Duration,
    peers: BTreeMap<IpAddr, Peer>,
}

#[derive(Clone, Copy, Debug)]
struct Peer {
    state: PeerState,
    /// When the first probe without an answer was sent.
    waits_since: Option<Instant>,
}

impl Peers {
    pub(crate) fn new(patience: Duration) -> Self {
        Self { patience, peers: BTreeMap::new() }
    }

    /// Sets which nodes are asked; what is known of others is forgotten.
    pub(crate) fn set(&mut self, wanted: &BTreeSet<IpAddr>) {
        self.peers.retain(|it, _| wanted.contains(it));
        for it in wanted {
            self.peers.entry(*it).or_insert(Peer { state: PeerState::Untried, waits_since: None });
        }
    }

    /// Whom to ask, in turn: each gets one probe.
    pub(crate) fn ask(&mut self, now: Instant) -> impl Iterator<Item = IpAddr> {
        self.peers.iter_mut().map(move |(address, it)| {
            it.waits_since.get_or_insert(now);
            *address
        })
    }

    /// An address has answered.
    pub(crate) fn on_answer(&mut self, address: IpAddr) {
        if let Some(peer) = self.peers.get_mut(&address) {
            *peer = Peer { state: PeerState::Answers, waits_since: None };
        }
    }

    /// Finds out which nodes are silent now. To be called once the answers so far are known.
    pub(crate) fn judge(&mut self, now: Instant) {
        for peer in self.peers.values_mut() {
            if peer.waits_since.is_some_and(|it| it + self.patience <= now) {
                peer.state = match peer.state {
                    PeerState::Untried | PeerState::Mute => PeerState::Mute,
                    PeerState::Answers | PeerState::Silent => PeerState::Silent,
                };
            }
        }
    }

    /// Whether one still has time for its first answer.
    pub(crate) fn has_untried(&self) -> bool {
        self.peers.values().any(|it| it.state == PeerState::Untried)
    }

    /// Whether nobody of several answers, so that others hear nothing of this node, either.
    pub(crate) fn are_all_silent(&self) -> bool {
        let answers = |it: &Peer| !matches!(it.state, PeerState::Silent | PeerState::Mute);
        self.peers.len() > 1 && !self.peers.values().any(answers)
    }

    pub(crate) fn states(&self) -> PeerStates {
        let is_cut_off = self.are_all_silent();
        let state = |peer: &Peer| match peer.state {
            PeerState::Silent if is_cut_off => PeerState::Answers,
            state => state,
        };
        self.peers.iter().map(|(address, it)| (*address, state(it))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(2);

    fn ip(number: u8) -> IpAddr {
        [192, 0, 2, number].into()
    }

    fn peers(numbers: impl IntoIterator<Item = u8>) -> Peers {
        let mut peers = Peers::new(PATIENCE);
        peers.set(&numbers.into_iter().map(ip).collect());
        peers
    }

    /// One probe to each a second, `answers` times answered by those with these numbers.
    fn run(peers: &mut Peers, begin: Instant, seconds: std::ops::Range<u64>, answering: &[u8]) {
        for second in seconds {
            let now = begin + Duration::from_secs(second);
            peers.judge(now);
            let asked: Vec<_> = peers.ask(now).collect();
            for it in asked.into_iter().filter(|it| answering.iter().any(|n| ip(*n) == *it)) {
                peers.on_answer(it);
            }
        }
    }

    fn states(peers: &Peers) -> Vec<PeerState> {
        peers.states().into_values().collect()
    }

    #[test]
    fn a_node_that_answered_is_silent_after_two_probes() {
        use PeerState::{Answers, Silent, Untried};
        let (mut peers, begin) = (peers([1, 2]), Instant::now());
        assert_eq!(states(&peers), [Untried, Untried]);
        assert!(peers.has_untried());
        run(&mut peers, begin, 0..5, &[1, 2]);
        assert_eq!(states(&peers), [Answers, Answers]);
        // One that is lost is no death.
        run(&mut peers, begin, 5..6, &[1]);
        run(&mut peers, begin, 6..8, &[1, 2]);
        assert_eq!(states(&peers), [Answers, Answers]);
        run(&mut peers, begin, 8..10, &[1]);
        assert_eq!(states(&peers), [Answers, Answers]);
        run(&mut peers, begin, 10..11, &[1]);
        assert_eq!(states(&peers), [Answers, Silent]);
        run(&mut peers, begin, 11..12, &[1, 2]);
        assert_eq!(states(&peers), [Answers, Answers]);
    }

    #[test]
    fn a_node_is_mute_until_it_answers_and_forgotten_once_it_is_not_asked() {
        use PeerState::{Answers, Mute, Untried};
        let (mut peers, begin) = (peers([1, 2]), Instant::now());
        run(&mut peers, begin, 0..10, &[1]);
        assert_eq!(states(&peers), [Answers, Mute]);
        run(&mut peers, begin, 10..11, &[1, 2]);
        assert_eq!(states(&peers), [Answers, Answers]);
        peers.set(&[ip(1), ip(3)].into());
        peers.set(&[ip(1), ip(2), ip(3)].into());
        assert_eq!(states(&peers), [Answers, Untried, Untried]);
    }

    #[test]
    fn if_nobody_answers_the_fault_is_here() {
        use PeerState::{Answers, Mute, Silent};
        let begin = Instant::now();
        let mut several = peers([1, 2, 3]);
        run(&mut several, begin, 0..3, &[1, 2]);
        run(&mut several, begin, 3..9, &[]);
        assert_eq!(states(&several), [Answers, Answers, Mute]);
        run(&mut several, begin, 9..10, &[1]);
        assert_eq!(states(&several), [Answers, Silent, Mute]);
        // The only other one may well be dead.
        let mut one = peers([1]);
        run(&mut one, begin, 0..3, &[1]);
        run(&mut one, begin, 3..9, &[]);
        assert_eq!(states(&one), [Silent]);
    }

    #[test]
    fn a_pause_of_this_process_silences_nobody() {
        let (mut peers, begin) = (peers([1, 2]), Instant::now());
        run(&mut peers, begin, 0..3, &[1, 2]);
        run(&mut peers, begin, 60..62, &[1, 2]);
        assert_eq!(states(&peers), [PeerState::Answers; 2]);
    }
}
