//! Connects to a brain.

use std::{error::Error, fmt, io, pin::Pin, sync::Arc, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::{Target, localv1::Extension};

/// How long to wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest message that is accepted; the longest ones are Services.
pub(super) const MAX_MESSAGE_SIZE: usize = 64 << 20;

/// A connection to a brain.
pub(super) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn ByteStream>>> + Send>>;

/// Makes connections other than by sockets.
#[derive(Clone)]
pub(super) struct ConnectBy(Arc<dyn Fn() -> Connecting + Send + Sync>);

impl ConnectBy {
    pub(super) fn new<F, S>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        Self(Arc::new(move || {
            let connecting = connect();
            Box::pin(async { Ok(Box::new(connecting.await?) as Box<dyn ByteStream>) })
        }))
    }
}

impl fmt::Debug for ConnectBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectBy").finish_non_exhaustive()
    }
}

/// What every view of the client library connects with.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    pub(super) target: Target,
    /// The node whose state is requested; empty for the brain's own node.
    pub(super) node: String,
    pub(super) extensions: Vec<Extension>,
    /// Why the last attempt failed; `None` since a complete state.
    pub(super) outage: watch::Sender<Option<String>>,
    /// How to connect; `None` for a socket of its own.
    pub(super) connect_by: Option<ConnectBy>,
    #[cfg(feature = "tls")]
    pub(super) tls: Option<crate::tls::ClientTls>,
}

impl Connector {
    /// The requested extensions, as requests have them.
    pub(super) fn extension_numbers(&self) -> Vec<i32> {
        self.extensions.iter().map(|it| (*it).into()).collect()
    }

    pub(super) async fn connect(&self) -> Result<Channel, String> {
        let scheme = self.scheme();
        let address = match &self.target {
            Target::Unix(path) => format!("unix://{}", path.display()),
            Target::Tcp { host, port } if host.contains(':') => format!("{scheme}://[{host}]:{port}"),
            Target::Tcp { host, port } => format!("{scheme}://{host}:{port}"),
        };
        let endpoint = Endpoint::from_shared(address).map_err(|it| error_chain(&it))?;
        #[cfg(feature = "tls")]
        let endpoint = match (&self.tls, &self.target) {
            (Some(tls), Target::Tcp { host, .. }) => {
                endpoint.tls_config(tls.config(host)).map_err(|it| error_chain(&it))?
            }
            _ => endpoint,
        };
        let endpoint = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            // TCP keepalive detects a lost host within 30 s. HTTP/2 pings would also detect a hanging process, but a gRPC
            // server in Go closes the connection if it gets more than one ping in five minutes.
            .tcp_keepalive(Some(Duration::from_secs(15)))
            .tcp_keepalive_interval(Some(Duration::from_secs(5)))
            .tcp_keepalive_retries(Some(3));
        let connected = match self.connect_by.clone() {
            None => endpoint.connect().await,
            Some(ConnectBy(connect)) => {
                let connector = service_fn(move |_| {
                    let connecting = connect();
                    async { Ok::<_, io::Error>(TokioIo::new(connecting.await?)) }
                });
                endpoint.connect_with_connector(connector).await
            }
        };
        connected.map_err(|it| error_chain(&it))
    }

    fn scheme(&self) -> &'static str {
        #[cfg(feature = "tls")]
        if self.tls.is_some() {
            return "https";
        }
        "http"
    }
}

/// An error with its causes.
pub(super) fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut cause = Some(error);
    while let Some(error) = cause {
        let part = match error.downcast_ref::<tonic::Status>() {
            Some(status) => format!("{} ({:?})", status.message(), status.code()),
            None => error.to_string(),
        };
        // Many errors repeat the text of their cause.
        if !text.contains(&part) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}
