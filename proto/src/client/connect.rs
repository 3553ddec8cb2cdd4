//! Connects to a brain.

use std::{error::Error, time::Duration};

use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};

use crate::{Target, localv1::Extension};

/// How long to wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest message that is accepted; the longest ones are Services.
pub(super) const MAX_MESSAGE_SIZE: usize = 64 << 20;

/// What every view of the client library connects with.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    pub(super) target: Target,
    /// The node whose state is requested; empty for the brain's own node.
    pub(super) node: String,
    pub(super) extensions: Vec<Extension>,
    /// Why the last attempt failed; `None` since a complete state.
    pub(super) outage: watch::Sender<Option<String>>,
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
        endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            // TCP keepalive detects a lost host within 30 s. HTTP/2 pings would also detect a hanging process, but a gRPC
            // server in Go closes the connection if it gets more than one ping in five minutes.
            .tcp_keepalive(Some(Duration::from_secs(15)))
            .tcp_keepalive_interval(Some(Duration::from_secs(5)))
            .tcp_keepalive_retries(Some(3))
            .connect()
            .await
            .map_err(|it| error_chain(&it))
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
