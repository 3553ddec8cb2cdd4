//! The connections of one or more listeners, limited in all and for each source.
//!
//! Invariant: a new connection is always admitted, and never are there more than the limit: the oldest one is closed for it,
//! whatever it does, since a client can always look busy. As many may be about to close: a new one does not wait for the end of another.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::Instant,
};

/// After closed connections were logged, further ones are only counted for this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// The length of the prefix of an IPv6 source: a host can use every address of its network.
const SOURCE_PREFIX_V6: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The limit of all sources together; at least 1.
    pub total: usize,
    /// The limit of one source: an IPv4 address, or an IPv6 network of 64 bits.
    pub per_source: usize,
}

/// The connections of one or more listeners. Clones share them.
#[derive(Clone, Debug)]
pub struct Connections(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// For the log.
    name: &'static str,
    limits: Limits,
    permits: Arc<Semaphore>,
    table: Mutex<Table>,
    closed: AtomicU64,
}

#[derive(Debug, Default)]
struct Table {
    last_id: u64,
    /// In the order of their admission.
    entries: BTreeMap<u64, Entry>,
    last_logged: Option<Instant>,
    /// The number of closed connections at the last message.
    closed_at_last_log: u64,
}

#[derive(Debug)]
struct Entry {
    source: IpAddr,
    /// `None` once it has been told to close.
    close: Option<oneshot::Sender<()>>,
}

impl Connections {
    /// With these limits; `name` is for the log.
    pub fn new(name: &'static str, limits: Limits) -> Self {
        let total = limits.total.max(1);
        Self(Arc::new(Inner {
            name,
            limits: Limits { total, ..limits },
            // For those that are open, and those that are about to close.
            permits: Arc::new(Semaphore::new(2 * total)),
            table: Mutex::default(),
            closed: AtomicU64::new(0),
        }))
    }

    /// Admits a new connection: closes another one if necessary.
    pub async fn admit(&self, source: IpAddr) -> Connection {
        let permit =
            Arc::clone(&self.0.permits).acquire_owned().await.expect("the semaphore is never closed");
        let source = source_of(source);
        let (close, closing) = oneshot::channel();
        let mut table = self.0.table.lock();
        if table.open().filter(|(_, it)| it.source == source).count() >= self.0.limits.per_source {
            self.0.close_oldest(&mut table, Some(source));
        } else if table.open().count() >= self.0.limits.total {
            self.0.close_oldest(&mut table, None);
        }
        table.last_id += 1;
        let id = table.last_id;
        table.entries.insert(id, Entry { source, close: Some(close) });
        Connection { connections: self.clone(), id, closing, _permit: permit }
    }

    /// Closes the oldest connection, for example when there are no file descriptors left.
    pub fn close_one(&self) {
        self.0.close_oldest(&mut self.0.table.lock(), None);
    }

    /// The number of connections, without those that are about to close.
    pub fn count(&self) -> usize {
        self.0.table.lock().open().count()
    }

    /// The number of connections that were closed for others so far.
    pub fn closed(&self) -> u64 {
        self.0.closed.load(Ordering::Relaxed)
    }

    pub fn limits(&self) -> Limits {
        self.0.limits
    }
}

impl Inner {
    /// Closes the oldest connection, of one source or of all.
    fn close_oldest(&self, table: &mut Table, source: Option<IpAddr>) {
        let of_source = |it: &Entry| source.is_none_or(|source| it.source == source);
        let oldest = table.open().find(|(_, it)| of_source(it));
        let Some(id) = oldest.map(|(id, _)| *id) else { return };
        let close = table.entries.get_mut(&id).and_then(|it| it.close.take());
        // The receiver is gone if the connection ends by itself.
        let _ = close.map(|it| it.send(()));
        let closed = self.closed.fetch_add(1, Ordering::Relaxed) + 1;
        if table.last_logged.is_none_or(|it| it.elapsed() >= LOG_INTERVAL) {
            tracing::warn!(
                listener = self.name,
                open = table.open().count() + 1,
                limit = self.limits.total,
                limit_per_source = self.limits.per_source,
                closed = closed - table.closed_at_last_log,
                "too many connections are open; the oldest were closed for new ones"
            );
            (table.last_logged, table.closed_at_last_log) = (Some(Instant::now()), closed);
        }
    }
}

impl Table {
    /// The entries that have not been told to close.
    fn open(&self) -> impl Iterator<Item = (&u64, &Entry)> {
        self.entries.iter().filter(|(_, it)| it.close.is_some())
    }
}

/// A connection; its place is free when this is dropped.
#[derive(Debug)]
pub struct Connection {
    connections: Connections,
    id: u64,
    /// Resolves when the connection must be closed.
    pub closing: oneshot::Receiver<()>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.0.table.lock().entries.remove(&self.id);
    }
}

fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(it) => Ipv6Addr::from_bits(it.to_bits() >> SOURCE_PREFIX_V6 << SOURCE_PREFIX_V6).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// The maximum number of open files of this process.
pub fn max_open_files() -> usize {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| usize::try_from(soft).unwrap_or(usize::MAX))
}

/// Raises the maximum number of open files to the hard limit of this process.
pub fn raise_max_open_files() -> nix::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn source(n: u8) -> IpAddr {
        Ipv4Addr::new(192, 0, 2, n).into()
    }

    async fn admit(all: &Connections, sources: impl IntoIterator<Item = u8>) -> Vec<Connection> {
        let mut admitted = Vec::new();
        for n in sources {
            admitted.push(all.admit(source(n)).await);
        }
        admitted
    }

    fn is_closing(connection: &mut Connection) -> bool {
        connection.closing.try_recv().is_ok()
    }

    #[tokio::test]
    async fn the_oldest_connection_is_closed_for_a_new_one() {
        let all = Connections::new("test", Limits { total: 3, per_source: 3 });
        let mut open = admit(&all, 0..3).await;
        let new = all.admit(source(9)).await;
        assert_eq!(open.iter_mut().map(is_closing).collect::<Vec<_>>(), [true, false, false]);
        assert_eq!((all.count(), all.closed()), (3, 1));
        drop((open, new));
        assert_eq!(all.count(), 0);
    }

    #[tokio::test]
    async fn no_more_connections_are_about_to_close_than_may_be_open() {
        let all = Connections::new("test", Limits { total: 3, per_source: 3 });
        let mut held = admit(&all, 0..6).await;
        assert_eq!((all.count(), all.closed()), (3, 3));
        let table = all.clone();
        let admission = tokio::spawn(async move { table.admit(source(9)).await });
        tokio::task::yield_now().await;
        assert!(!admission.is_finished(), "it waits until one has closed");
        drop(held.remove(0));
        let _new = admission.await.unwrap();
        assert_eq!((all.count(), all.closed()), (3, 4));
    }

    #[tokio::test]
    async fn a_source_beyond_its_share_closes_its_own_connections() {
        let all = Connections::new("test", Limits { total: 100, per_source: 2 });
        let mut others = admit(&all, 0..10).await;
        let mut own = admit(&all, [200; 10]).await;
        assert_eq!(own.iter_mut().filter_map(|it| is_closing(it).then_some(())).count(), 8);
        assert!(!is_closing(&mut own[9]) && !others.iter_mut().any(is_closing));
    }

    #[test]
    fn a_source_is_an_address_or_an_ipv6_network() {
        let parse = |it: &str| source_of(it.parse().unwrap());
        assert_eq!(parse("2001:db8::1"), parse("2001:db8::ffff:0:0:1"));
        assert_ne!(parse("2001:db8::1"), parse("2001:db8:0:1::1"));
        assert_eq!(parse("::ffff:192.0.2.1"), source(1));
        assert_ne!(source(1), source(2));
    }
}
