//! Accepts connections, completes their TLS handshakes, and serves their requests over HTTP/2.
//!
//! Invariant: no client waits for another, and a connection costs a constant, whatever its client reads or does not read.
//! Connections run concurrently. Handshakes have a timeout; the oldest is closed if there are too many, and accepting
//! continues after every error.

use std::{future::Future, io, net::SocketAddr, pin::pin, time::Duration};

use hyper::{Request, body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use proxy_contract::Target;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_rustls::rustls;
use tonic::{body::Body, codegen::Service as _, service::Routes};

use super::{
    clients::Clients,
    listen::{Accepted, ByteStream, Listener},
};

/// The delay after an error of accept(2), such as EMFILE.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// After a failed handshake, further ones with the same reason are not logged as warnings for this time.
const LOG_DEDUP_INTERVAL: Duration = Duration::from_secs(60);
/// After this time without traffic, a client is pinged.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// A client that does not answer the ping within this time is disconnected.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// The limit of concurrent streams of a connection, unless its client is trusted.
const MAX_STREAMS: u32 = 8;
/// The limit of a response that is kept for a stream whose client does not read, in bytes.
const SEND_BUFFER: usize = 32 << 10;
/// The largest header list of a request, in bytes.
const MAX_HEADERS: u32 = 16 << 10;
/// The time that a shutdown waits for clients.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

struct HandshakeError {
    client: SocketAddr,
    reason: String,
}

/// Serves all connections of a listener until `stop`, and then up to one second longer until each has its responses.
pub(crate) async fn serve_connections(
    mut listener: Listener,
    routes: Routes,
    stop: impl Future<Output = ()>,
) {
    let stopping = watch::Sender::new(());
    let mut connections = JoinSet::new();
    let mut last_warning = None;
    // Before that, after a failed accept, only what is connected goes on.
    let mut accept_at = Instant::now();
    let mut stop = pin!(stop);
    loop {
        let accept = async {
            sleep_until(accept_at).await;
            listener.accept().await
        };
        tokio::select! {
            () = &mut stop => break,
            Some(ended) = connections.join_next() => match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) => log_failure(listener.address(), error, &mut last_warning),
                Err(error) => tracing::warn!(address = %listener.address(), %error, "connection failed"),
            },
            accepted = accept => match accepted {
                Ok(accepted) => {
                    let (clients, stopping) = (listener.clients.clone(), stopping.subscribe());
                    connections.spawn(serve_connection(accepted, clients, routes.clone(), stopping));
                }
                Err(error) => {
                    let address = listener.address();
                    tracing::warn!(%address, %error, retry_in = ?ACCEPT_BACKOFF, "accept failed");
                    // There may be no file descriptors left.
                    listener.clients.handshakes().close_one();
                    accept_at = Instant::now() + ACCEPT_BACKOFF;
                }
            },
        }
    }
    drop(listener);
    stopping.send_replace(());
    // After the timeout, the remaining connections are closed.
    let _ = timeout(SHUTDOWN_TIMEOUT, async { while connections.join_next().await.is_some() {} }).await;
}

/// Logs a failed handshake: as a warning, unless the last warning is recent and has the same reason.
fn log_failure(address: &Target, error: HandshakeError, last_warning: &mut Option<(String, Instant)>) {
    let HandshakeError { client, reason } = error;
    let is_repeated =
        last_warning.as_ref().is_some_and(|(last, at)| *last == reason && at.elapsed() < LOG_DEDUP_INTERVAL);
    if is_repeated {
        tracing::debug!(%address, %client, error = reason, "TLS handshake failed");
    } else {
        tracing::warn!(%address, %client, error = reason, "TLS handshake failed");
        *last_warning = Some((reason, Instant::now()));
    }
}

/// Serves a connection until it ends, is refused, or must make room for another one.
async fn serve_connection(
    accepted: Accepted,
    clients: Clients,
    routes: Routes,
    mut stopping: watch::Receiver<()>,
) -> Result<(), HandshakeError> {
    let (stream, peer) = match accepted {
        Accepted::Local(stream, peer) => (stream, peer),
        Accepted::Tls(stream, client, tls) => {
            let mut place = clients.handshakes().admit(client.ip()).await;
            tokio::select! {
                _ = &mut place.closing => return Ok(()),
                _ = stopping.changed() => return Ok(()),
                result = tls.handshake(stream) => match result {
                    Ok((stream, peer)) => (Box::new(stream) as Box<dyn ByteStream>, peer),
                    Err(error) => return Err(HandshakeError { client, reason: reason(&error) }),
                },
            }
        }
    };
    let Some(_admission) = clients.admit(peer.clone()) else { return Ok(()) };
    let max_streams = (!peer.is_trusted()).then_some(MAX_STREAMS);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer.clone());
        let mut routes = routes.clone();
        async move { routes.call(request.map(Body::new)).await }
    });
    let mut serving = pin!(
        http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .max_concurrent_streams(max_streams)
            .max_send_buf_size(SEND_BUFFER)
            .max_header_list_size(MAX_HEADERS)
            .serve_connection(TokioIo::new(stream), service)
    );
    tokio::select! {
        // An error concerns only this client.
        _ = &mut serving => return Ok(()),
        _ = stopping.changed() => serving.as_mut().graceful_shutdown(),
    }
    let _ = serving.await;
    Ok(())
}

fn reason(error: &io::Error) -> String {
    match error.get_ref().and_then(|it| it.downcast_ref()) {
        Some(rustls::Error::InvalidMessage(_)) => format!("{error}: not TLS, or corrupt"),
        _ => error.to_string(),
    }
}
