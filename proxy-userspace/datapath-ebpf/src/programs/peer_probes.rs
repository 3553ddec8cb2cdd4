//! Asks the nodes that packets are forwarded to whether they unwrap them.
//!
//! The programs answer, so a node answers also while its proxy does not run.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use bytemuck::bytes_of;
use datapath::PeerCounts;
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use proxy_common::forward::Probe;

use crate::tables::peers::{PeerState, PeerStates, Peers};

/// Between two probes of a node.
const INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time after which a node may be said not to answer: one lost probe is no sign.
pub const MIN_TIMEOUT: Duration = Duration::from_secs(2);
/// When to look for the first answers.
const FIRST_LOOK: Duration = Duration::from_millis(50);
/// The answers of 5,000 nodes, with the kernel's own overhead.
const RECEIVE_BUFFER: usize = 4 << 20;
/// How many datagrams are read at once: anybody may send them.
const MAX_ANSWERS: usize = 20_000;
/// How many addresses one line of the log names.
const MAX_LOGGED: usize = 5;

pub(crate) struct PeerProbes {
    /// Where nodes receive wrapped packets.
    port: u16,
    peers: Peers,
    states: PeerStates,
    /// Whether nobody answered the last time.
    was_cut_off: bool,
    /// By the address of this node that probes are sent from.
    sockets: BTreeMap<IpAddr, UdpSocket>,
    /// The tokens of the last rounds. Others are not answered any more.
    tokens: [[u32; 2]; 3],
    next_round: Instant,
}

impl PeerProbes {
    /// A node that does not answer for this time is silent.
    pub(crate) fn new(port: u16, timeout: Duration) -> Self {
        // The node may have gone right after its last answer, an interval before the probe that it does not answer.
        let patience = timeout.saturating_sub(INTERVAL);
        Self {
            port,
            peers: Peers::new(patience),
            states: PeerStates::new(),
            was_cut_off: false,
            sockets: BTreeMap::new(),
            tokens: [[0; 2]; 3],
            next_round: Instant::now(),
        }
    }

    /// Sets whom to ask, from which addresses of this node.
    pub(crate) fn set(&mut self, own: &BTreeSet<IpAddr>, wanted: &BTreeSet<IpAddr>) {
        self.peers.set(wanted);
        self.sockets.retain(|it, _| own.contains(it) && !wanted.is_empty());
        for address in own.iter().filter(|_| !wanted.is_empty()) {
            if self.sockets.contains_key(address) {
                continue;
            }
            match open(*address) {
                Ok(socket) => drop(self.sockets.insert(*address, socket)),
                Err(error) => {
                    tracing::error!(%address, %error, "nodes cannot be asked whether they unwrap packets");
                }
            }
        }
        self.next_round = Instant::now();
    }

    /// Reads answers, and asks again if that is due. Returns the states of nodes if they have changed, and when to call again.
    pub(crate) fn step(&mut self) -> (Option<PeerStates>, Duration) {
        if self.sockets.is_empty() && self.states.is_empty() {
            return (None, INTERVAL);
        }
        let now = self.exchange();
        let mut states = self.peers.states();
        report(&self.states, &states);
        let is_cut_off = self.peers.are_all_silent();
        // Others have given this node's rows away meanwhile. It does so, too, and takes them back at the next step: so it knows
        // who has served them.
        let has_returned = std::mem::replace(&mut self.was_cut_off, is_cut_off) && !is_cut_off;
        if has_returned {
            states.extend(self.sockets.keys().map(|own| (*own, PeerState::Silent)));
        }
        let changed = (self.states != states).then(|| states.clone());
        self.states = states;
        let rest = self.next_round.saturating_duration_since(now);
        let is_soon = has_returned || self.peers.has_untried();
        (changed, if is_soon { rest.min(FIRST_LOOK) } else { rest })
    }

    /// Reads answers, and asks again if that is due. Returns the time.
    fn exchange(&mut self) -> Instant {
        self.read_answers();
        let now = Instant::now();
        self.peers.judge(now);
        if self.next_round <= now {
            self.next_round = now + INTERVAL;
            self.ask(now);
        }
        now
    }

    /// How many answer.
    pub(crate) fn counts(&self) -> PeerCounts {
        let of = |state: PeerState| self.states.values().filter(|it| **it == state).count();
        PeerCounts {
            answering: of(PeerState::Answers),
            silent: of(PeerState::Silent),
            mute: of(PeerState::Mute),
        }
    }

    fn read_answers(&mut self) {
        let mut bytes = [0; size_of::<Probe>() + 1];
        for socket in self.sockets.values() {
            for _ in 0..MAX_ANSWERS {
                // If nothing can be read, there is no answer.
                let Ok((length, from)) = socket.recv_from(&mut bytes) else { break };
                let answer = bytemuck::try_pod_read_unaligned::<Probe>(&bytes[..length]).ok();
                if answer.is_some_and(|it| it.is_probe() && self.tokens.contains(&it.token))
                    && from.port() == self.port
                {
                    self.peers.on_answer(from.ip());
                }
            }
        }
    }

    fn ask(&mut self, now: Instant) {
        let token = [fastrand::u32(..), fastrand::u32(..)];
        self.tokens.rotate_right(1);
        self.tokens[0] = token;
        let probe = Probe::new(token);
        for address in self.peers.ask(now) {
            let socket = self.sockets.iter().find(|(own, _)| own.is_ipv4() == address.is_ipv4());
            if let Some((_, socket)) = socket
                && let Err(error) = socket.send_to(bytes_of(&probe), (address, self.port))
            {
                tracing::debug!(node = %address, %error, "a node cannot be asked");
            }
        }
    }
}

/// Asks nodes until each has answered, or had time for it; those that were not asked are untried. Takes up to
/// [`MIN_TIMEOUT`].
pub(crate) fn ask_all(port: u16, own: &BTreeSet<IpAddr>, others: &BTreeSet<IpAddr>) -> PeerStates {
    let mut probes = PeerProbes::new(port, MIN_TIMEOUT);
    probes.set(own, others);
    let end = Instant::now() + MIN_TIMEOUT;
    while probes.exchange() < end && probes.peers.has_untried() {
        thread::sleep(FIRST_LOOK);
    }
    probes.peers.states()
}

fn open(address: IpAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(SocketAddr::new(address, 0))?;
    socket.set_nonblocking(true)?;
    if let Err(error) = setsockopt(&socket, RcvBufForce, &RECEIVE_BUFFER) {
        tracing::debug!(%error, "the receive buffer of probes cannot be enlarged");
    }
    Ok(socket)
}

/// Logs which nodes have become silent, and which answer again.
fn report(before: &PeerStates, now: &PeerStates) {
    if before == now {
        return;
    }
    // How many have become so, and some of them.
    let became = |state: PeerState| {
        let nodes = now.iter().filter(|(address, it)| **it == state && before.get(*address) != Some(&state));
        let nodes: Vec<_> = nodes.map(|(address, _)| address).collect();
        let some: Vec<_> = nodes.iter().take(MAX_LOGGED).map(ToString::to_string).collect();
        (!nodes.is_empty()).then(|| (nodes.len(), some.join(", ")))
    };
    if let Some((count, nodes)) = became(PeerState::Silent) {
        tracing::warn!(
            count,
            nodes,
            "nodes do not answer any more: packets from outside go to endpoints on others"
        );
    }
    if let Some((count, nodes)) = became(PeerState::Mute) {
        tracing::warn!(
            count,
            nodes,
            "nodes do not answer probes: Services that begin to be forwarded to them are translated until they do"
        );
    }
    if let Some((count, nodes)) = became(PeerState::Answers) {
        tracing::info!(count, nodes, "nodes answer: they unwrap packets from outside");
    }
}
