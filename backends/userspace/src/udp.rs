//! UDP: a flow for each client, which is a socket that is connected to an endpoint.
//!
//! Invariant: bounded. A flow ends after [`FLOW_TIMEOUT`] without a datagram, and with its endpoint; datagrams of new
//! clients are discarded when there are too many flows.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

use proxy_contract::backend::Family;
use tokio::{
    net::UdpSocket,
    sync::OwnedSemaphorePermit,
    task::AbortHandle,
    time::{Instant, MissedTickBehavior, interval, timeout_at},
};

use crate::{frontend::Address, listen_at::unspecified, table::Table};

/// How long a flow lives without a datagram.
const FLOW_TIMEOUT: Duration = Duration::from_secs(60);
/// How often what is left of ended flows is removed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
const MAX_DATAGRAM: usize = 65_535;

/// A client's flow; its task ends when it is dropped.
struct Flow {
    socket: Arc<UdpSocket>,
    endpoint: SocketAddr,
    last: Arc<Mutex<Instant>>,
    replies: AbortHandle,
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.replies.abort();
    }
}

/// Forwards until it is aborted.
pub(crate) async fn serve(socket: UdpSocket, address: Address, table: Arc<Table>) {
    let socket = Arc::new(socket);
    let mut flows: HashMap<SocketAddr, Flow> = HashMap::new();
    let mut buffer = vec![0; MAX_DATAGRAM];
    let mut sweep = interval(SWEEP_INTERVAL);
    sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let received = tokio::select! {
            received = socket.recv_from(&mut buffer) => received,
            _ = sweep.tick() => {
                flows.retain(|_, it| !it.replies.is_finished());
                continue;
            }
        };
        // An error is the kernel's message about a reply that did not reach its client.
        let Ok((length, client)) = received else { continue };
        match flow(&mut flows, &socket, client, &address, &table).await {
            Ok(Some(flow)) => {
                *flow.last.lock() = Instant::now();
                // A datagram may be lost; what the endpoint refuses is noticed by the task.
                let _ = flow.socket.send(&buffer[..length]).await;
            }
            Ok(None) => {}
            Err(error) => {
                table.warn(|| format!("{address}: a datagram of {client} is discarded: {error}"));
            }
        }
    }
}

/// The flow of a client, a new one if necessary; `None` if it is not served.
async fn flow<'a>(
    flows: &'a mut HashMap<SocketAddr, Flow>,
    socket: &Arc<UdpSocket>,
    client: SocketAddr,
    address: &Address,
    table: &Table,
) -> io::Result<Option<&'a Flow>> {
    let Some(frontend) = table.get(address) else { return Ok(None) };
    let is_inside = table.is_inside(client.ip(), own(socket));
    let continues =
        |it: &Flow| !it.replies.is_finished() && frontend.may_continue(client.ip(), is_inside, it.endpoint);
    if !flows.get(&client).is_some_and(continues) {
        flows.remove(&client);
        let Some(endpoint) = frontend.candidates(client.ip(), is_inside).first().copied() else {
            return Ok(None);
        };
        let Ok(permit) = Arc::clone(&table.udp_flows).try_acquire_owned() else {
            return Err(io::Error::other("there are too many flows"));
        };
        let upstream = UdpSocket::bind((unspecified(Family::of(endpoint.ip())), 0)).await?;
        upstream.connect(endpoint).await?;
        frontend.chosen(client.ip(), endpoint);
        let (upstream, last) = (Arc::new(upstream), Arc::new(Mutex::new(Instant::now())));
        let task = replies(Arc::clone(&upstream), Arc::clone(socket), client, Arc::clone(&last), permit);
        let replies = tokio::spawn(task).abort_handle();
        flows.insert(client, Flow { socket: upstream, endpoint, last, replies });
    }
    Ok(flows.get(&client))
}

/// The address that the socket has; at the unspecified one it is not known at which a datagram came.
fn own(socket: &UdpSocket) -> IpAddr {
    socket.local_addr().map_or(unspecified(Family::V4), |it| it.ip())
}

/// Returns what an endpoint sends to the client, until the flow has been idle or the endpoint refuses.
async fn replies(
    upstream: Arc<UdpSocket>,
    socket: Arc<UdpSocket>,
    client: SocketAddr,
    last: Arc<Mutex<Instant>>,
    _permit: OwnedSemaphorePermit,
) {
    let mut buffer = vec![0; MAX_DATAGRAM];
    loop {
        let until = *last.lock() + FLOW_TIMEOUT;
        match timeout_at(until, upstream.recv(&mut buffer)).await {
            Ok(Ok(length)) => {
                *last.lock() = Instant::now();
                // The client may be gone.
                let _ = socket.send_to(&buffer[..length], client).await;
            }
            Ok(Err(_)) => return,
            Err(_) if *last.lock() + FLOW_TIMEOUT <= Instant::now() => return,
            Err(_) => {}
        }
    }
}
