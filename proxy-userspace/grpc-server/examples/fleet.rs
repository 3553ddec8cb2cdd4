//! Simulated agents of many nodes in one process, for `cargo xtask bench fleet`: each has a connection of its own, requests
//! what an agent requests, reads everything, keeps nothing of it but digests, and reconnects as the client library does.
//!
//! `fleet SOCKET FIRST END` follows the nodes nFIRST to nEND (excluded). A line `expect TEXT` on standard input is answered
//! by `expecting TEXT`, and by `seen TEXT NANOS BYTES` as soon as each agent has completed a state with a value that contains
//! TEXT. `synced COUNT NANOS BYTES` says that each has completed the first state of a connection for the COUNTth time. NANOS
//! is the monotonic clock, BYTES what all have received so far.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "what it is for")]

use std::{
    collections::{HashMap, VecDeque},
    error::Error,
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hyper_util::rt::TokioIo;
use itertools::{EitherOrBoth, Itertools as _};
use listeners::raise_max_open_files;
use nix::time::{ClockId, clock_gettime};
use parking_lot::Mutex;
use proxy_contract::{
    digest::{self, Buckets, Digest, KeptBuckets, MAX_BUCKETS},
    localv1::{Digests, OpItem, Ref, Set, Value, WatchReq, op_item::Op, sets_client::SetsClient},
};
use tokio::{net::UnixStream, sync::mpsc, time::sleep};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::io::InspectReader;
use tonic::transport::Endpoint;
use tower::service_fn;
use wire::Extensions;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const USAGE: &str = "usage: fleet SOCKET FIRST END";
const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// What the agents share.
#[derive(Default)]
struct Fleet {
    /// The expected text, and how many were expected before it.
    expected: Mutex<(u64, Arc<[u8]>)>,
    received: AtomicU64,
    interner: Mutex<Interner>,
}

/// Small numbers for what the agents keep: most have the same.
#[derive(Default)]
struct Interner {
    /// The number of each object, and that of its group.
    objects: HashMap<(Set, String), (u32, u32)>,
    groups: HashMap<(Set, String), u32>,
    positions: Vec<u32>,
    numbers: HashMap<Digest, u32>,
    digests: Vec<Digest>,
}

impl Interner {
    /// The numbers of an object: of its group, and its own.
    fn object(&mut self, it: &Ref) -> Result<(u32, u32)> {
        let set = Set::try_from(it.set)?;
        let next = u32::try_from(self.objects.len())?;
        let (group_set, group) = digest::group_of(set, &it.path).ok_or("a path without a group")?;
        let positions = &mut self.positions;
        let group = *self.groups.entry((group_set, group.into_owned())).or_insert_with_key(|(set, path)| {
            positions.push(digest::position(*set, path));
            u32::try_from(positions.len() - 1).unwrap_or(u32::MAX)
        });
        let (object, group) = *self.objects.entry((set, it.path.clone())).or_insert((next, group));
        Ok((group, object))
    }

    fn digest(&mut self, it: &Ref, bytes: &[u8]) -> Result<u32> {
        let digest = digest::object(Set::try_from(it.set)?, &it.path, bytes);
        let next = u32::try_from(self.digests.len())?;
        let number = *self.numbers.entry(digest).or_insert(next);
        if number == next {
            self.digests.push(digest);
        }
        Ok(number)
    }
}

/// What an agent has: the numbers of the group, the object and the digest, in ascending order.
#[derive(Default)]
struct Inventory {
    objects: Vec<(u32, u32, u32)>,
    /// What has come since the last sync; no digest if it was deleted.
    pending: Vec<(u32, u32, Option<u32>)>,
    /// The groups that a stream does not begin with, if it has just begun.
    kept: Option<Option<KeptBuckets>>,
}

impl Inventory {
    fn message(&self, interner: &Interner) -> Option<Digests> {
        let groups: Vec<_> = self.objects.chunk_by(|a, b| a.0 == b.0).collect();
        let mut buckets = Buckets::new(groups.len().next_power_of_two().min(MAX_BUCKETS));
        for group in &groups {
            let mut digests: Vec<_> = group.iter().map(|it| interner.digests[it.2 as usize]).collect();
            buckets.add(interner.positions[group[0].0 as usize], digest::all(&mut digests));
        }
        (!groups.is_empty()).then(|| Digests::of(&buckets.finish()))
    }

    fn sync(&mut self, interner: &Interner) {
        if let Some(kept) = self.kept.take() {
            self.objects.retain(|(group, ..)| {
                kept.as_ref().is_some_and(|it| it.contains(interner.positions[*group as usize]))
            });
        }
        if self.pending.len() > 64 {
            // The last one of an object counts.
            self.pending.reverse();
            self.pending.sort_by_key(|it| (it.0, it.1));
            self.pending.dedup_by_key(|it| (it.0, it.1));
            let all = std::mem::take(&mut self.objects).into_iter();
            let all = all.merge_join_by(self.pending.drain(..), |a, b| (a.0, a.1).cmp(&(b.0, b.1)));
            self.objects = all
                .filter_map(|it| match it {
                    EitherOrBoth::Left(it) => Some(it),
                    EitherOrBoth::Right((group, object, digest))
                    | EitherOrBoth::Both(_, (group, object, digest)) => Some((group, object, digest?)),
                })
                .collect();
            return;
        }
        for (group, object, digest) in self.pending.drain(..) {
            match (self.objects.binary_search_by_key(&(group, object), |it| (it.0, it.1)), digest) {
                (Ok(at), Some(it)) => self.objects[at].2 = it,
                (Ok(at), None) => drop(self.objects.remove(at)),
                (Err(at), Some(it)) => self.objects.insert(at, (group, object, it)),
                (Err(_), None) => {}
            }
        }
    }
}

/// What an agent reports.
enum Report {
    /// It has completed the first state of a connection for the nth time.
    Synced(usize),
    /// It has completed a state with the nth expected text.
    Seen(u64),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    // A connection is a file descriptor.
    raise_max_open_files()?;
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [socket, first, end] = &arguments[..] else { return Err(USAGE.into()) };
    let (socket, first, end) = (PathBuf::from(socket), first.parse::<u32>()?, end.parse::<u32>()?);
    let fleet = Arc::<Fleet>::default();
    let (sender, mut reports) = mpsc::unbounded_channel();
    for node in first..end {
        let agent = Agent {
            socket: socket.clone(),
            node: format!("n{node}"),
            fleet: Arc::clone(&fleet),
            reports: sender.clone(),
            synced: 0,
            inventory: Inventory::default(),
        };
        tokio::spawn(agent.run());
    }
    let agents = usize::try_from(end - first)?;
    let (lines, mut input) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        io::stdin().lines().map_while(std::result::Result::ok).try_for_each(|it| lines.send(it))
    });
    // How many agents have completed a first state, for the nth time.
    let (mut synced, mut first_synced, mut seen) = (VecDeque::new(), 1, 0);
    loop {
        tokio::select! {
            line = input.recv() => {
                let Some(line) = line else { return Ok(()) };
                let text = line.strip_prefix("expect ").ok_or("write expect TEXT")?;
                let mut expected = fleet.expected.lock();
                *expected = (expected.0 + 1, text.as_bytes().into());
                seen = 0;
                println!("expecting {text}");
            }
            Some(report) = reports.recv() => match report {
                Report::Synced(count) => {
                    let place = count - first_synced;
                    synced.resize(synced.len().max(place + 1), 0);
                    synced[place] += 1;
                    while synced.front() == Some(&agents) {
                        synced.pop_front();
                        println!("synced {first_synced} {}", figures(&fleet)?);
                        first_synced += 1;
                    }
                }
                Report::Seen(number) => {
                    let (current, text) =
                        fleet.expected.lock().clone();
                    seen += usize::from(number == current);
                    if number == current && seen == agents {
                        println!("seen {} {}", String::from_utf8_lossy(&text), figures(&fleet)?);
                    }
                }
            }
        }
    }
}

/// The time, on a clock that all processes share, and the bytes received.
fn figures(fleet: &Fleet) -> Result<String> {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    Ok(format!("{} {}", now.as_nanos(), fleet.received.load(Ordering::Relaxed)))
}

struct Agent {
    socket: PathBuf,
    node: String,
    fleet: Arc<Fleet>,
    reports: mpsc::UnboundedSender<Report>,
    /// On how many connections it has completed a state.
    synced: usize,
    inventory: Inventory,
}

impl Agent {
    async fn run(mut self) {
        let (mut backoff, mut has_failed) = (MIN_BACKOFF, false);
        loop {
            let before = self.synced;
            let Err(error) = self.follow().await else { return };
            if self.synced > before {
                (backoff, has_failed) = (MIN_BACKOFF, false);
            }
            // The first failure after a state is the end of a brain.
            if std::mem::replace(&mut has_failed, true) && backoff == MAX_BACKOFF {
                eprintln!("{}: {error}", self.node);
            }
            sleep(backoff.mul_f64(1.0 + fastrand::f64())).await;
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
    }

    async fn follow(&mut self) -> Result<()> {
        let (socket, fleet) = (self.socket.clone(), Arc::clone(&self.fleet));
        let connector = service_fn(move |_: tonic::transport::Uri| {
            let (socket, fleet) = (socket.clone(), Arc::clone(&fleet));
            async move {
                let stream = UnixStream::connect(socket).await?;
                let count = move |bytes: &[u8]| {
                    fleet
                        .received
                        .fetch_add(u64::try_from(bytes.len()).unwrap_or_default(), Ordering::Relaxed);
                };
                Ok::<_, io::Error>(TokioIo::new(InspectReader::new(stream, count)))
            }
        });
        let channel = Endpoint::from_static("http://brain").connect_with_connector(connector).await?;
        let (requests, outgoing) = mpsc::channel(1);
        let extensions = Extensions::LOCAL.numbers();
        let request =
            WatchReq { node_name: self.node.clone(), extensions, have: None, ..WatchReq::default() };
        let have = self.inventory.message(&self.fleet.interner.lock());
        let buckets = have.as_ref().map_or(0, |it| it.buckets.len() / size_of::<Digest>());
        requests.send(WatchReq { have, ..request.clone() }).await?;
        let mut items = SetsClient::new(channel).watch(ReceiverStream::new(outgoing)).await?.into_inner();
        let (mut is_first, mut last_seen, mut expected) = (true, 0, (0, Arc::default()));
        let mut has_text = false;
        while let Some(OpItem { op }) = items.message().await? {
            match &op {
                Some(Op::Reset(_)) => {
                    self.inventory.pending.clear();
                    self.inventory.kept = Some(None);
                }
                Some(Op::Kept(it)) => {
                    self.inventory.kept = Some(KeptBuckets::parse(it.buckets.clone(), buckets));
                }
                Some(Op::Set(Value { r#ref: Some(it), bytes })) => {
                    let mut interner = self.fleet.interner.lock();
                    let (group, object) = interner.object(it)?;
                    let digest = interner.digest(it, bytes)?;
                    self.inventory.pending.push((group, object, Some(digest)));
                }
                Some(Op::Delete(it)) => {
                    let (group, object) = self.fleet.interner.lock().object(it)?;
                    self.inventory.pending.push((group, object, None));
                }
                Some(Op::Sync(_)) => self.inventory.sync(&self.fleet.interner.lock()),
                _ => {}
            }
            match op {
                Some(Op::Set(it)) if !is_first && !has_text => {
                    if expected.0 == last_seen {
                        expected = self.fleet.expected.lock().clone();
                    }
                    has_text = expected.0 > last_seen && contains(&it.bytes, &expected.1);
                }
                Some(Op::Sync(_)) => {
                    if std::mem::take(&mut is_first) {
                        self.synced += 1;
                        self.reports.send(Report::Synced(self.synced))?;
                    }
                    if std::mem::take(&mut has_text) {
                        last_seen = expected.0;
                        self.reports.send(Report::Seen(expected.0))?;
                    }
                    requests.send(request.clone()).await?;
                }
                _ => {}
            }
        }
        Err("the brain has ended the stream".into())
    }
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|it| it == text)
}
