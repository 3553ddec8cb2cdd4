//! How an API server is connected to other than over TCP: through a tunnel, or in memory.
//!
//! TLS is up to the connection: what it carries is HTTP as it is.

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::Uri;
use hyper_util::{
    client::legacy::connect::{Connected, Connection},
    rt::TokioIo,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tower::Service;

/// A connection to an API server.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {
    /// Whether both ends have agreed on HTTP/2.
    fn has_http2(&self) -> bool;
}

impl Connection for Box<dyn ByteStream> {
    fn connected(&self) -> Connected {
        let connected = Connected::new();
        if self.has_http2() { connected.negotiated_h2() } else { connected }
    }
}

type Connecting = Pin<Box<dyn Future<Output = io::Result<TokioIo<Box<dyn ByteStream>>>> + Send>>;

/// Makes connections to an API server. Clones make the same ones.
#[derive(Clone)]
pub struct Connector(Arc<dyn Fn() -> Connecting + Send + Sync>);

impl Connector {
    /// Connects by calling `connect`.
    pub fn new<F, S>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<S>> + Send + 'static,
        S: ByteStream + 'static,
    {
        Self(Arc::new(move || {
            let connecting = connect();
            Box::pin(async { Ok(TokioIo::new(Box::new(connecting.await?) as Box<dyn ByteStream>)) })
        }))
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn ByteStream>>;
    type Error = io::Error;
    type Future = Connecting;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Connecting {
        (self.0)()
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").finish_non_exhaustive()
    }
}
