//! Measures a brain that serves many nodes over a socket; `cargo xtask bench brain` runs it, each case in a process of
//! its own.
//!
//! `serving SERVICES ENDPOINTS NODES WATCHED CHANGES STREAMS` prints one JSON object: what the change of one endpoint costs
//! until every watcher has it, and what a further watcher costs. The watchers are in other processes, STREAMS of them to a
//! connection; CPU and memory are those of the brain, with all that it does to serve.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "what it is for")]

#[path = "../../brain/examples/bench/cluster.rs"]
mod cluster;

use std::{
    collections::VecDeque, error::Error, ops::Range, path::Path, process::Stdio, sync::Arc, time::Duration,
};

use brain::{Brain, Options};
use grpc_server::{Listener, ServedData};
use listeners::raise_max_open_files;
use nix::time::{ClockId, clock_gettime};
use proxy_contract::{
    Target,
    localv1::{WatchReq, op_item::Op, sets_client::SetsClient},
};
use publish::{NodeRegistry, Publisher};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

use cluster::{SyntheticCluster, cpu, node_name, resident};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const USAGE: &str = "usage: serving SERVICES ENDPOINTS NODES WATCHED CHANGES STREAMS";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    // A connection is a file descriptor.
    raise_max_open_files()?;
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    if let [word, socket, first, end, streams] = &arguments[..]
        && word == "watch"
    {
        return watch(Path::new(socket), first.parse()?..end.parse()?, streams.parse()?).await;
    }
    let numbers: Vec<u32> =
        arguments.iter().map(|it| it.parse()).collect::<std::result::Result<_, _>>().map_err(|_| USAGE)?;
    let [services, endpoints, nodes, watched, changes, streams] = numbers[..] else {
        return Err(USAGE.into());
    };
    if [services, endpoints, changes, streams].contains(&0) || watched < 2 || watched > nodes {
        return Err(format!("{USAGE}; none may be 0, and of the nodes 2 or more be watched").into());
    }
    measure(SyntheticCluster { services, endpoints, nodes }, watched, changes, streams).await
}

async fn measure(cluster: SyntheticCluster, watched: u32, changes: u32, streams: u32) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("proxy.sock");
    let listener = Listener::bind(&Target::Unix(socket.clone())).await?;
    let nodes = NodeRegistry::new(Publisher::new(node_name(cluster.nodes)));
    let cluster_publisher = publish::cluster::ClusterPublisher::new(None);
    let served = ServedData::new(nodes.requests(), &cluster_publisher);
    let serving = grpc_server::serve(listener, served, async {}, std::future::pending());
    let serving = tokio::spawn(serving);

    let mut brain = Brain::new(Options::default());
    brain.replace_cluster(Arc::new(cluster.initial()));
    let mut bench = Bench { cluster, brain, nodes, next_change: 1 };

    // One watcher, and then all the others.
    let mut first = Watchers::start(&socket, 0..1, streams)?;
    first.received(&mut bench, 1).await?;
    bench.change(&mut [&mut first]).await?;
    // As a brain does every few seconds.
    process::give_back_memory();
    let with_one = resident()?;
    let start = cpu()?;
    let mut others = Watchers::start(&socket, 1..watched, streams)?;
    others.received(&mut bench, 1).await?;
    let first_states = (cpu()? - start) / (watched - 1);
    // What changes leave behind counts.
    for _ in 0..changes.min(20) {
        bench.change(&mut [&mut first, &mut others]).await?;
    }
    process::give_back_memory();
    let with_all = resident()?;

    let (mut times, mut cpus) = (Vec::new(), Vec::new());
    for _ in 0..changes {
        let start = cpu()?;
        times.push(bench.change(&mut [&mut first, &mut others]).await?);
        cpus.push(cpu()? - start);
    }
    serving.abort();
    let millis = |it: Duration| it.as_secs_f64() * 1e3;
    let mean = |all: &[Duration]| millis(all.iter().sum::<Duration>()) / f64::from(changes);
    println!(
        "{{\"firstStateMs\":{:.2},\"changeCpuMs\":{:.3},\"changeWallMs\":{:.2},\"worstWallMs\":{:.2},\
         \"residentMb\":{:.1},\"furtherWatcherKb\":{:.1}}}",
        millis(first_states),
        mean(&cpus),
        mean(&times),
        times.iter().max().copied().map_or(0.0, millis),
        with_all as f64 / 1024.0,
        with_all.saturating_sub(with_one) as f64 / f64::from(watched - 1),
    );
    Ok(())
}

struct Bench {
    cluster: SyntheticCluster,
    brain: Brain,
    nodes: NodeRegistry,
    next_change: u32,
}

impl Bench {
    fn publish(&mut self) {
        for node in self.brain.recompute() {
            if let Some(state) = self.brain.state(&node) {
                self.nodes.publish(&node, state.clone());
            }
        }
    }

    /// Changes one endpoint; returns the time until the last watcher has it.
    async fn change(&mut self, watchers: &mut [&mut Watchers]) -> Result<Duration> {
        let slice = self.cluster.change(self.next_change)?;
        self.next_change += 1;
        let start = now()?;
        self.brain.set_slice(slice);
        self.publish();
        let mut last = start;
        for it in watchers {
            let states = it.states + 1;
            last = last.max(it.received(self, states).await?);
        }
        Ok(last.saturating_sub(start))
    }
}

/// Watchers in another process.
struct Watchers {
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
    /// How many states each of them has received.
    states: u64,
}

impl Watchers {
    fn start(socket: &Path, nodes: Range<u32>, streams: u32) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("watch")
            .arg(socket)
            .args([nodes.start, nodes.end, streams].map(|it| it.to_string()))
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let stdout = child.stdout.take().ok_or("the watchers have no output")?;
        Ok(Self { child, output: BufReader::new(stdout).lines(), states: 0 })
    }

    /// Waits until each has received a number of states; returns when that was.
    async fn received(&mut self, bench: &mut Bench, states: u64) -> Result<Duration> {
        loop {
            let line = tokio::select! {
                line = self.output.next_line() => line?,
                asked = bench.nodes.requested() => {
                    asked.iter().for_each(|it| bench.brain.start_serving(it));
                    bench.publish();
                    continue;
                }
            };
            let Some(line) = line else {
                return Err(format!("the watchers have ended: {}", self.child.wait().await?).into());
            };
            let (count, at) = line.split_once(' ').ok_or("what the watchers say cannot be read")?;
            self.states = count.parse()?;
            if self.states >= states {
                return Ok(Duration::from_nanos(at.parse()?));
            }
        }
    }
}

/// Watches nodes, a number of them per connection; prints when the last of them has received each state.
async fn watch(socket: &Path, nodes: Range<u32>, streams: usize) -> Result<()> {
    let (sender, mut received) = mpsc::unbounded_channel();
    let watched = nodes.end - nodes.start;
    for some in nodes.collect::<Vec<_>>().chunks(streams) {
        let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))?.connect_lazy();
        for node in some.iter().map(|it| node_name(*it)) {
            let (channel, sender) = (channel.clone(), sender.clone());
            tokio::spawn(async move {
                if let Err(error) = watch_one(channel, &node, &sender).await {
                    eprintln!("{node}: {error}");
                }
            });
        }
    }
    drop(sender);
    // How many watchers lack each state, from `first` on.
    let (mut first, mut missing) = (1, VecDeque::new());
    while let Some(count) = received.recv().await {
        let place = usize::try_from(count - first)?;
        missing.resize(missing.len().max(place + 1), watched);
        missing[place] -= 1;
        while missing.front() == Some(&0) {
            missing.pop_front();
            println!("{first} {}", now()?.as_nanos());
            first += 1;
        }
    }
    Err("the brain has gone".into())
}

/// Sends the number of each state that it receives.
async fn watch_one(channel: Channel, node: &str, sender: &mpsc::UnboundedSender<u64>) -> Result<()> {
    let (requests, outgoing) = mpsc::channel(1);
    let request = WatchReq { node_name: node.to_owned(), ..WatchReq::default() };
    requests.send(request.clone()).await?;
    let mut items = SetsClient::new(channel).watch(ReceiverStream::new(outgoing)).await?.into_inner();
    let mut count = 0;
    while let Some(item) = items.message().await? {
        if let Some(Op::Sync(_)) = item.op {
            count += 1;
            sender.send(count)?;
            requests.send(request.clone()).await?;
        }
    }
    Ok(())
}

/// A clock that all processes share.
fn now() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_MONOTONIC)?.into())
}
