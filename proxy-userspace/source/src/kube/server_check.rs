//! Asks an API server whose watches are open but idle whether it still answers requests.
//!
//! Without this, a server that does not is noticed when a watch ends and is to be renewed, after minutes: pings are
//! answered by the connection, and bookmarks come from a server that shuts down, too.
//!
//! Invariant: one request at a time, and none while others are answered or changed objects arrive.
//!
//! Its cost: `/version` is a constant that every client may read; unlike `/readyz` it does not reach the database, and unlike
//! a shorter watch it leaves no work behind. When nothing changes, 5,000 nodes send 125 of them per second, a quarter
//! of the leases that their kubelets write, on connections that are open anyway. When the server has much to do, objects
//! change, which proves the state current, and nothing is sent.

use std::sync::Arc;

use super::{
    backoff::Backoff,
    shared::{SERVER, Shared},
    shared_client::{IDENTITY, JSON, NumberedClient, SharedClient},
    timing::Timing,
    watch_error::{ErrorKind, WatchError},
    watch_stream::read_all,
};

const PATH: &str = "/version";
/// How much of the body is read, in bytes.
const MAX_BODY: usize = 64 << 10;

/// Runs forever.
pub(super) async fn run(client: Arc<SharedClient>, shared: Arc<Shared>, timing: Timing) {
    let mut backoff = Backoff::new(timing.backoff);
    loop {
        // Not all nodes at once, whose watches may have begun at one moment.
        shared.idle(timing.idle.0.mul_f64(0.8 + 0.2 * fastrand::f64())).await;
        let used = client.get();
        let Err(error) = request(&used, &timing).await else {
            backoff.reset();
            shared.contact(SERVER);
            shared.followed(SERVER);
            continue;
        };
        let is_unreachable = error.kind.is_unreachable();
        let next = backoff.failed(error.retry_after, timing.max_delay(is_unreachable));
        shared.failed(SERVER, &error, next);
        shared.wait(next, error.retry_after.is_none()).await;
        // A new connection may reach another server behind the same address.
        if is_unreachable && let Err(text) = client.reload(&used, false).await {
            shared.failed(SERVER, &WatchError::new(ErrorKind::Other, text), next);
        }
    }
}

/// Fails if there is no answer, or one that a load balancer without a server gives; others are those of a living server.
async fn request(client: &NumberedClient, timing: &Timing) -> Result<(), WatchError> {
    let limit = timing.idle.1;
    let (parts, mut body) = client.get(PATH, PATH, JSON, IDENTITY, limit).await?.into_parts();
    let body = read_all(&mut body, PATH, limit, MAX_BODY).await?;
    if parts.status.is_server_error() {
        return Err(WatchError::status(PATH, parts.status, &parts.headers, &body, false));
    }
    Ok(())
}
