//! The CPU time of packets from outside, by their path; one core does all the work for them, from the client's system call on.
//! Invariant: a figure is a difference of times of the same packets, one of which are dropped earlier.

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    path::PathBuf,
    process::Command,
    time::Duration,
};

use ::tests::NetNs;
use anyhow::{Context as _, Result, ensure};
use build_tools::{command::output, programs::find_or_install};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};

use crate::{
    figures::medians_in_order,
    outside_cluster::{BenchCluster, NETWORKS, SERVING},
};

const FLOWS: usize = 1_000;
/// How many datagrams of each flow are measured at a time.
const PER_FLOW: usize = 20;
const ROUNDS: usize = 25;
/// An Ethernet frame of 60 bytes.
pub(crate) const PAYLOAD: [u8; 18] = [0; 18];
const CORE: usize = 1;

/// CPU times of a packet in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PacketFigures {
    /// The node that it enters by, which forwards it.
    pub(crate) forwarded: f64,
    /// The node that it enters by, with the nftables path.
    pub(crate) translated: f64,
    /// The node that serves it, of a packet that it unwraps.
    pub(crate) unwrapped: f64,
    /// The same of a packet that came to this node.
    pub(crate) served: f64,
}

/// Keeps this thread on one core.
pub(crate) fn pin_to_core() -> Result<()> {
    let mut cores = CpuSet::new();
    cores.set(CORE)?;
    sched_setaffinity(Pid::from_raw(0), &cores).with_context(|| format!("there is no core {CORE}"))
}

fn while_dropped(netns: &NetNs, interface: &str, work: impl FnOnce() -> Result<f64>) -> Result<f64> {
    let chain = format!("type filter hook ingress device {interface} priority 0;");
    nft(netns, &format!("table netdev bench {{ chain drops {{ {chain} meta l4proto udp drop; }}; }}"))?;
    let result = work();
    let deleted = nft(netns, "delete table netdev bench").context("packets stay dropped");
    let time = result?;
    deleted?;
    Ok(time)
}

fn nft(netns: &NetNs, command: &str) -> Result<()> {
    netns.run(|| output(Command::new(find_or_install("nft", "nftables")?).arg(command)).map(drop))
}

/// Measures packets that take the paths in turns.
pub(crate) fn measure(forwarding: &BenchCluster, translating: &BenchCluster) -> Result<PacketFigures> {
    let [by, by_nft] = [Sender::new(forwarding)?, Sender::new(translating)?];
    let (node, lan) = (&forwarding.cluster.nodes[SERVING].netns, &forwarding.cluster.lan);
    let [dropping, at_bridge, forwarded, served, unwrapped, translated] =
        medians_in_order(ROUNDS, |which| match which {
            // Where it arrives, before the bridge, and as it leaves.
            0 => while_dropped(node, "eth0", || by.send(SERVING)),
            1 => while_dropped(lan, "router", || by.send(SERVING)),
            2 => while_dropped(lan, "n1", || by.send(0)),
            3 => by.send_counted(1),
            4 => by.send_counted(0),
            _ => while_dropped(&translating.cluster.lan, "n1", || by_nft.send(0)),
        })?;
    Ok(PacketFigures {
        forwarded: forwarded - dropping,
        translated: translated - dropping,
        // From the bridge on, where forwarded packets were dropped.
        unwrapped: unwrapped - forwarded - (dropping - at_bridge),
        served: served - dropping,
    })
}

/// The CPU time of the node that a packet enters by, which forwards it.
pub(crate) fn forwarded(bench: &BenchCluster) -> Result<f64> {
    let sender = Sender::new(bench)?;
    let [dropping, forwarded] = medians_in_order(ROUNDS, |which| match which {
        0 => while_dropped(&bench.cluster.nodes[SERVING].netns, "eth0", || sender.send(SERVING)),
        _ => while_dropped(&bench.cluster.lan, "n1", || sender.send(0)),
    })?;
    Ok(forwarded - dropping)
}

/// Sockets of a client, one for each flow.
struct Sender<'a> {
    bench: &'a BenchCluster,
    sockets: Vec<UdpSocket>,
}

impl<'a> Sender<'a> {
    fn new(bench: &'a BenchCluster) -> Result<Self> {
        let connect = || {
            let socket = UdpSocket::bind(SocketAddr::from(([0; 4], 0)))?;
            socket.connect(bench.sink)?;
            anyhow::Ok(socket)
        };
        let _outside = bench.cluster.clients[0].enter()?;
        let sockets = (0..FLOWS).map(|_| connect()).collect::<Result<_>>()?;
        let sender = Self { bench, sockets };
        // Connections that conntrack has seen once, and neighbors.
        for node in 0..SERVING {
            sender.send(node)?;
        }
        Ok(sender)
    }

    /// Sends datagrams by a node: the CPU time of one in nanoseconds.
    fn send(&self, node: usize) -> Result<f64> {
        self.bench.cluster.set_next_hops(NETWORKS, &[node]);
        let before = cpu_time()?;
        for _ in 0..PER_FLOW {
            for it in &self.sockets {
                it.send(&PAYLOAD)?;
            }
        }
        Ok((cpu_time()? - before).as_nanos() as f64 / (FLOWS * PER_FLOW) as f64)
    }

    /// Like [`Self::send`]; fails if more than one percent of the datagrams do not arrive.
    fn send_counted(&self, node: usize) -> Result<f64> {
        let pods = &self.bench.cluster.nodes[1].pods;
        let before = received(pods)?;
        let time = self.send(node)?;
        let arrived = received(pods)? - before;
        ensure!(arrived >= FLOWS * PER_FLOW * 99 / 100, "only {arrived} datagrams have arrived");
        Ok(time)
    }
}

/// The CPU time of this thread, to which the kernel's work for its packets counts, and of the core's thread for deferred work.
fn cpu_time() -> Result<Duration> {
    let name = format!("ksoftirqd/{CORE}\n");
    let is_it = |it: &PathBuf| fs::read_to_string(it.join("comm")).is_ok_and(|it| it == name);
    let mut processes = fs::read_dir("/proc")?.flatten().map(|it| it.path());
    let deferred = processes.find(is_it).context("there is no ksoftirqd")?;
    let deferred = fs::read_to_string(deferred.join("schedstat"))?;
    let deferred = deferred.split(' ').next().and_then(|it| it.parse().ok()).context("no time")?;
    let own = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
    Ok(Duration::from(own) + Duration::from_nanos(deferred))
}

/// How many packets have arrived in a namespace.
fn received(netns: &NetNs) -> Result<usize> {
    let text = netns.run(|| fs::read_to_string("/proc/thread-self/net/dev"))?;
    let counters = text.lines().find_map(|it| it.trim().strip_prefix("eth0:")).context("no eth0")?;
    Ok(counters.split_whitespace().nth(1).context("no packets")?.parse()?)
}
