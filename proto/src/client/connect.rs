//! Connects to a brain: to any one of several.
//!
//! Clients try the brains in random order, so that they spread, and names are resolved anew for each round.
//! If there are several brains, one that does not say that it serves is left for the next.

use std::{error::Error, fmt, io, net::SocketAddr, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::lookup_host,
    sync::watch,
    time::timeout,
};
use tonic::{
    Code,
    transport::{Channel, Endpoint, Uri},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tower::util::BoxCloneSyncService;

use crate::{Target, Targets, localv1::Extension};

/// The time limit of a connection attempt, and of each other step on the way to a stream.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest message that is accepted; the longest ones are Services.
pub(super) const MAX_MESSAGE_SIZE: usize = 64 << 20;

pub(super) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// Makes connections other than by sockets.
pub(super) type Connector = BoxCloneSyncService<Uri, TokioIo<Box<dyn ByteStream>>, io::Error>;

/// A client of a brain, on behalf of a node.
///
/// ```
/// use proxy_contract::client::Client;
///
/// let client = Client::new("brain-0:9090,brain-1:9090".parse()?, "node-1");
/// assert_eq!((client.targets().iter().count(), client.node()), (2, "node-1"));
/// # Ok::<_, proxy_contract::TargetError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    pub(super) targets: Targets,
    /// The node whose state is requested; empty for the brain's own node.
    pub(super) node: String,
    pub(super) extensions: Vec<Extension>,
    /// Why the last attempt failed; `None` since a complete state.
    pub(super) outage: watch::Sender<Option<String>>,
    /// Makes connections; `None` for a socket of its own.
    pub(super) connect_by: Option<Connector>,
    #[cfg(feature = "tls")]
    pub(super) tls: Option<crate::tls::ClientTls>,
}

impl Client {
    /// The requested extensions, as requests have them.
    pub(super) fn extension_numbers(&self) -> Vec<i32> {
        self.extensions.iter().map(|it| (*it).into()).collect()
    }

    /// Connects to the next brain of `round`, or the first one of a new round.
    pub(super) async fn connect(&self, round: &mut Round) -> Result<Channel, String> {
        if round.untried.is_empty() {
            let mut addresses = self.addresses().await;
            fastrand::shuffle(&mut addresses);
            // The one that has just failed comes last.
            addresses.sort_by_key(|it| round.current.as_ref() != Some(it));
            round.has_alternatives = addresses.len() > 1;
            round.untried = addresses;
        }
        round.current = round.untried.pop();
        let brain = round.current.as_ref().ok_or("there is no address")?;
        let channel = self.connect_to(brain).await?;
        if round.has_alternatives {
            check_serving(&channel).await?;
        }
        Ok(channel)
    }

    pub(super) async fn connect_any(&self) -> Result<Channel, String> {
        let mut round = Round::default();
        loop {
            match self.connect(&mut round).await {
                Err(_) if round.has_untried() => {}
                connected => return connected,
            }
        }
    }

    /// Every address of the brains. A name that cannot be resolved now stays one, and fails when it is its turn.
    pub(super) async fn addresses(&self) -> Vec<Address> {
        let mut all = Vec::new();
        for target in self.targets.iter() {
            let mut sockets = Vec::new();
            if let (Target::Tcp { host, port }, None) = (target, &self.connect_by)
                && let Ok(Ok(it)) = timeout(CONNECT_TIMEOUT, lookup_host((host.as_str(), *port))).await
            {
                sockets.extend(it.map(Some));
            }
            if sockets.is_empty() {
                sockets.push(None);
            }
            all.extend(sockets.into_iter().map(|socket| Address { target: target.clone(), socket }));
        }
        all
    }

    pub(super) async fn connect_to(&self, brain: &Address) -> Result<Channel, String> {
        let scheme = self.scheme();
        let uri = match &brain.target {
            Target::Unix(path) => format!("unix://{}", path.display()),
            Target::Tcp { host, port } if host.contains(':') => format!("{scheme}://[{host}]:{port}"),
            Target::Tcp { host, port } => format!("{scheme}://{host}:{port}"),
        };
        let endpoint = match brain.socket {
            // Requests bear the name, wherever they go.
            Some(socket) => Endpoint::from_shared(format!("{scheme}://{socket}"))
                .map_err(|it| error_chain(&it))?
                .origin(uri.parse::<Uri>().map_err(|it| error_chain(&it))?),
            None => Endpoint::from_shared(uri).map_err(|it| error_chain(&it))?,
        };
        #[cfg(feature = "tls")]
        let endpoint = match (&self.tls, &brain.target) {
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
            Some(connector) => endpoint.connect_with_connector(connector).await,
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

/// Fails if a brain does not serve yet, or does not respond in time. One without the health service is considered serving.
async fn check_serving(channel: &Channel) -> Result<(), String> {
    let mut health = HealthClient::new(channel.clone());
    match in_time(health.check(HealthCheckRequest::default())).await? {
        Ok(it) if it.get_ref().status() == ServingStatus::Serving => Ok(()),
        Ok(_) => Err("the brain has no state yet".to_owned()),
        Err(status) if status.code() == Code::Unimplemented => Ok(()),
        Err(status) => Err(error_chain(&status)),
    }
}

/// The response of a brain, unless it takes too long.
pub(super) async fn in_time<T>(response: impl Future<Output = T>) -> Result<T, String> {
    let response = timeout(CONNECT_TIMEOUT, response).await;
    response.map_err(|_| format!("no response within {CONNECT_TIMEOUT:?}"))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    target: Target,
    /// An address of the host, if that was resolved.
    socket: Option<SocketAddr>,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.target.fmt(f)?;
        match (&self.target, self.socket) {
            (Target::Tcp { host, .. }, Some(socket)) if *host != socket.ip().to_string() => {
                write!(f, " ({socket})")
            }
            _ => Ok(()),
        }
    }
}

/// The brains that have not been tried since the last state.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// The last one comes first.
    untried: Vec<Address>,
    current: Option<Address>,
    has_alternatives: bool,
}

impl Round {
    /// Whether another brain can be tried at once.
    pub(super) fn has_untried(&self) -> bool {
        !self.untried.is_empty()
    }

    /// The brain has sent a state: if it is lost, a new round begins.
    pub(super) fn end(&mut self) {
        self.untried.clear();
    }

    /// The brain that was tried last, for the log; `targets` before the first one.
    pub(super) fn shown(&self, targets: &Targets) -> String {
        self.current.as_ref().map_or_else(|| targets.to_string(), ToString::to_string)
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_address_of_each_name_is_a_brain_of_its_own() {
        let targets = "unix:///x,localhost:1,[::1]:2,10.0.0.1:3,no-name.invalid:4".parse().unwrap();
        let all = Client::new(targets, "").addresses().await;
        let mut shown: Vec<_> = all.iter().map(ToString::to_string).collect();
        // It may have one of each family.
        let of_name = shown.extract_if(.., |it| it.starts_with("tcp://localhost:1 (")).count();
        assert!((1..=2).contains(&of_name), "{shown:?}");
        assert_eq!(shown, ["unix:///x", "tcp://[::1]:2", "tcp://10.0.0.1:3", "tcp://no-name.invalid:4"]);
    }
}
