//! A small HTTP/1 server for pages of a few lines.
//!
//! Invariant: a client costs bounded time and memory: so many connections at once, a request each, and ten seconds.

use std::{convert::Infallible, future::ready, io, net::SocketAddr, sync::Arc, time::Duration};

use hyper::{Request, Response, StatusCode, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    task::JoinHandle,
    time::{sleep, timeout},
};

const MAX_CONNECTIONS: usize = 32;
/// How long a connection may take.
const TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) content_type: &'static str,
    pub(super) body: String,
}

impl Answer {
    pub(super) fn not_found() -> Self {
        Self { status: StatusCode::NOT_FOUND, content_type: "text/plain", body: "no such page\n".to_owned() }
    }
}

/// A server; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Server(JoinHandle<()>);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Server {
    /// Answers requests at `address` by their path.
    ///
    /// # Errors
    ///
    /// The address cannot be listened at.
    pub(super) async fn start(
        address: SocketAddr,
        answer: impl Fn(&str) -> Answer + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        Ok(Self(tokio::spawn(serve(listener, Arc::new(answer)))))
    }
}

async fn serve(listener: TcpListener, answer: Arc<dyn Fn(&str) -> Answer + Send + Sync>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to a page");
                sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        let answer = Arc::clone(&answer);
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let Answer { status, content_type, body } = answer(request.uri().path());
                let mut response = Response::new(body);
                *response.status_mut() = status;
                response.headers_mut().insert("content-type", content_type.try_into().expect("it is ASCII"));
                ready(Ok::<_, Infallible>(response))
            });
            let connection =
                http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
            // A client that breaks off, or that is too slow, gets no answer.
            let _ = timeout(TIMEOUT, connection).await;
            drop(permit);
        });
    }
}
