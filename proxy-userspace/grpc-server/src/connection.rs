//! Serves the requests of connections over HTTP/2.
//!
//! Invariant: a connection costs a constant, whatever its client reads or does not read.

use std::{future::Future, pin::pin, time::Duration};

use hyper::{Request, body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{sync::watch, task::JoinSet};
use tonic::{body::Body, codegen::Service as _, service::Routes};

use super::{
    accept::{Acceptor, Connection},
    listen::Listener,
};

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

/// Serves all connections of a listener until `stop`, and then until each has its responses.
pub(crate) async fn serve_connections(listener: Listener, routes: Routes, stop: impl Future<Output = ()>) {
    let stopping = watch::Sender::new(());
    let mut connections = JoinSet::new();
    {
        let mut acceptor = Acceptor::new(listener);
        let mut stop = pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => break,
                Some(_) = connections.join_next() => {}
                connection = acceptor.next() => {
                    connections.spawn(serve_connection(connection, routes.clone(), stopping.subscribe()));
                }
            }
        }
        // Here the listener is closed.
    }
    stopping.send_replace(());
    while connections.join_next().await.is_some() {}
}

async fn serve_connection(connection: Connection, routes: Routes, mut stopping: watch::Receiver<()>) {
    let Connection { stream, peer, admission } = connection;
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
            .max_concurrent_streams((!admission.is_trusted()).then_some(MAX_STREAMS))
            .max_send_buf_size(SEND_BUFFER)
            .max_header_list_size(MAX_HEADERS)
            .serve_connection(TokioIo::new(stream), service)
    );
    tokio::select! {
        // An error concerns only this client.
        _ = &mut serving => return,
        _ = stopping.changed() => serving.as_mut().graceful_shutdown(),
    }
    let _ = serving.await;
    drop(admission);
}
