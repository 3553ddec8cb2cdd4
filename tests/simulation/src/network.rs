//! The network between the processes: connections in memory that are late, fragmented, stalled, and cut at any byte.

use std::{
    collections::BTreeMap,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use fastrand::{bool, u64, usize};
use parking_lot::Mutex;
use source::kube::ByteStream;
use tokio::{
    io::{
        AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf, duplex, split,
    },
    sync::{mpsc, watch},
    time::sleep,
};

use crate::history;

/// A process that others connect to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Server {
    Api,
    /// A brain, by its index.
    Brain(usize),
}

/// The server's end of a connection.
pub(crate) type Accepted = Box<dyn grpc_server::ByteStream>;

const BACKLOG: usize = 64;

/// The network. Clones are the same one.
#[derive(Clone, Default)]
pub(crate) struct Network(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    servers: BTreeMap<Server, Listening>,
    links: BTreeMap<u64, Link>,
    last_id: u64,
    /// The largest part of what is sent that arrives at once.
    max_fragment: usize,
    has_http2: bool,
}

struct Listening {
    accepted: mpsc::Sender<Accepted>,
    /// Whether nothing that is sent to it arrives, connection requests included.
    is_unreachable: bool,
}

/// A connection, as the network sees it.
struct Link {
    client: String,
    server: Server,
    fate: watch::Sender<Fate>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Fate {
    /// After how many more bytes it is cut.
    cut_after: Option<usize>,
    is_stalled: bool,
}

impl Network {
    pub(crate) fn new(max_fragment: usize, has_http2: bool) -> Self {
        Self(Arc::new(Mutex::new(State { max_fragment, has_http2, ..State::default() })))
    }

    /// The connections that a server accepts from now on.
    pub(crate) fn listen(&self, server: Server) -> mpsc::Receiver<Accepted> {
        let (accepted, connections) = mpsc::channel(BACKLOG);
        self.0.lock().servers.insert(server, Listening { accepted, is_unreachable: false });
        connections
    }

    /// A server has ended: its connections are closed, and new ones are refused.
    pub(crate) fn close(&self, server: Server) {
        let mut state = self.0.lock();
        state.servers.remove(&server);
        state.cut(|it| it.server == server);
    }

    /// A client has ended: its connections are closed.
    pub(crate) fn close_client(&self, client: &str) {
        self.0.lock().cut(|it| it.client == client);
    }

    /// Connects, as soon as the server can be reached.
    pub(crate) fn connect(
        &self,
        client: &str,
        server: Server,
    ) -> impl Future<Output = io::Result<Pipe>> + Send + use<> {
        let (network, client) = (self.clone(), client.to_owned());
        async move {
            sleep(latency()).await;
            while network.0.lock().servers.get(&server).is_some_and(|it| it.is_unreachable) {
                sleep(Duration::from_millis(500)).await;
            }
            network.open(client, server)
        }
    }

    fn open(&self, client: String, server: Server) -> io::Result<Pipe> {
        let mut state = self.0.lock();
        let (max_fragment, has_http2) = (state.max_fragment, state.has_http2);
        let size = [64, 4 << 10, 64 << 10][usize(..3)];
        let is_reset = Arc::new(AtomicBool::new(false));
        let pipe = |io| Pipe { io, is_reset: Arc::clone(&is_reset), has_http2 };
        let (ours, client_end) = duplex(size);
        let (theirs, server_end) = duplex(size);
        let accepted = state.servers.get(&server).map(|it| it.accepted.try_send(Box::new(pipe(theirs))));
        if accepted.is_none_or(|it| it.is_err()) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        state.last_id += 1;
        let id = state.last_id;
        let fate = watch::Sender::new(Fate::default());
        let carrier = Carrier { id, fate: fate.clone(), max_fragment };
        state.links.insert(id, Link { client, server, fate });
        let (network, reset) = (self.clone(), Arc::clone(&is_reset));
        tokio::spawn(async move {
            carrier.run(client_end, server_end, &reset).await;
            network.0.lock().links.remove(&id);
        });
        Ok(pipe(ours))
    }

    /// Cuts a connection, at once or after some more bytes.
    pub(crate) fn cut_one(&self) {
        let state = self.0.lock();
        let Some(it) = state.any_link() else { return };
        let after = if bool() { 0 } else { usize(..600) };
        history::note(format_args!("cut {} to {:?} after {after} bytes", it.client, it.server));
        it.fate.send_modify(|it| it.cut_after = Some(after));
    }

    /// Stalls a connection: what is sent does not arrive, and neither end gets an error.
    pub(crate) fn stall_one(&self) {
        let state = self.0.lock();
        let Some(it) = state.any_link() else { return };
        history::note(format_args!("stall {} to {:?}", it.client, it.server));
        it.fate.send_modify(|it| it.is_stalled = true);
    }

    /// A server cannot be reached; its connections are stalled, or cut.
    pub(crate) fn isolate(&self, server: Server, cuts: bool) {
        history::note(format_args!(
            "{server:?} is unreachable, connections are {}",
            if cuts { "cut" } else { "stalled" }
        ));
        let mut state = self.0.lock();
        if let Some(it) = state.servers.get_mut(&server) {
            it.is_unreachable = true;
        }
        if cuts {
            state.cut(|it| it.server == server);
        }
        for it in state.links.values().filter(|it| it.server == server) {
            it.fate.send_modify(|it| it.is_stalled = true);
        }
    }

    /// Everything can be reached again, and what was stalled arrives.
    pub(crate) fn heal(&self) {
        let mut state = self.0.lock();
        state.servers.values_mut().for_each(|it| it.is_unreachable = false);
        for it in state.links.values() {
            it.fate.send_modify(|it| *it = Fate::default());
        }
    }
}

impl State {
    fn any_link(&self) -> Option<&Link> {
        let links = self.links.len();
        if links == 0 { None } else { self.links.values().nth(usize(..links)) }
    }

    fn cut(&self, which: impl Fn(&Link) -> bool) {
        for it in self.links.values().filter(|it| which(it)) {
            it.fate.send_modify(|it| it.cut_after = Some(0));
        }
    }
}

fn latency() -> Duration {
    Duration::from_micros(match u64(..32) {
        0 => u64(..100_000),
        1..8 => u64(..4_000),
        _ => 0,
    })
}

/// Carries what the two ends of a connection send.
struct Carrier {
    id: u64,
    fate: watch::Sender<Fate>,
    max_fragment: usize,
}

impl Carrier {
    async fn run(&self, client: DuplexStream, server: DuplexStream, is_reset: &AtomicBool) {
        let (mut from_client, mut to_client) = split(client);
        let (mut from_server, mut to_server) = split(server);
        let mut fate = self.fate.subscribe();
        let is_cut = fate.wait_for(|it| it.cut_after == Some(0));
        tokio::select! {
            biased;
            _ = is_cut => is_reset.store(bool(), Ordering::Relaxed),
            () = self.carry(&mut from_client, &mut to_server) => {}
            () = self.carry(&mut from_server, &mut to_client) => {}
        }
    }

    /// Carries what is sent until one end is closed.
    async fn carry(&self, from: &mut (impl AsyncRead + Unpin), to: &mut (impl AsyncWrite + Unpin)) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            let mut rest = &buffer[..count];
            while !rest.is_empty() {
                let size = if bool() { self.max_fragment } else { usize(1..=self.max_fragment) };
                let fragment;
                (fragment, rest) = rest.split_at(size.min(rest.len()));
                let delay = latency();
                if !delay.is_zero() {
                    sleep(delay).await;
                }
                // The sender is here.
                let _ = self.fate.subscribe().wait_for(|it| !it.is_stalled).await;
                let mut allowed = fragment.len();
                self.fate.send_if_modified(|it| {
                    let Some(left) = &mut it.cut_after else { return false };
                    allowed = allowed.min(*left);
                    *left -= allowed;
                    true
                });
                history::data(self.id, &fragment[..allowed]);
                if to.write_all(&fragment[..allowed]).await.is_err() || allowed < fragment.len() {
                    return;
                }
            }
        }
    }
}

/// One end of a connection.
pub(crate) struct Pipe {
    io: DuplexStream,
    /// Whether it ends with an error.
    is_reset: Arc<AtomicBool>,
    has_http2: bool,
}

impl ByteStream for Pipe {
    fn has_http2(&self) -> bool {
        self.has_http2
    }
}

impl AsyncRead for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(context, buffer))?;
        let is_end = buffer.filled().len() == before && buffer.remaining() > 0;
        Poll::Ready(match is_end && self.is_reset.load(Ordering::Relaxed) {
            true => Err(io::ErrorKind::ConnectionReset.into()),
            false => Ok(()),
        })
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
