//! How an API server is connected to other than over TCP: through a tunnel, or in memory.
//!
//! TLS is up to the connection: what it carries is HTTP as it is.

use std::io;

use http::Uri;
use hyper_util::{
    client::legacy::connect::{Connected, Connection},
    rt::TokioIo,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tower::{service_fn, util::BoxCloneSyncService};

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

/// Makes connections to an API server. Clones make the same ones.
pub type Connector = BoxCloneSyncService<Uri, TokioIo<Box<dyn ByteStream>>, io::Error>;

/// Connects by calling `connect`.
pub fn connect_with<F, S>(connect: impl Fn() -> F + Clone + Send + Sync + 'static) -> Connector
where
    F: Future<Output = io::Result<S>> + Send + 'static,
    S: ByteStream + 'static,
{
    BoxCloneSyncService::new(service_fn(move |_: Uri| {
        let connecting = connect();
        async { connecting.await.map(|it| TokioIo::new(Box::new(it) as Box<dyn ByteStream>)) }
    }))
}
