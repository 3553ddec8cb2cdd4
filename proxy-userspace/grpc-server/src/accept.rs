//! Accepts connections and completes their TLS handshakes.
//!
//! Invariant: no client waits for another.
//! Handshakes run concurrently, each with a timeout; the oldest is closed if there are too many, and accepting continues
//! after every error.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_rustls::rustls;

use super::{
    authz::Peer,
    clients::{Admission, Clients},
    listen::{Accepted, ByteStream, Listener},
    tls::ServerTls,
};

/// The delay after an error of accept(2), such as EMFILE.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// After a failed handshake, further ones with the same reason are not logged as warnings for this time.
const LOG_DEDUP_INTERVAL: Duration = Duration::from_secs(60);

pub(crate) struct Acceptor {
    listener: Listener,
    handshakes: JoinSet<Result<Option<Connection>, HandshakeError>>,
    /// Before that, after a failed accept, only handshakes go on.
    accept_at: Instant,
    /// The last failure that was logged as a warning, and when.
    last_warning: Option<(String, Instant)>,
}

struct HandshakeError {
    client: SocketAddr,
    reason: String,
}

impl Acceptor {
    pub(crate) fn new(listener: Listener) -> Self {
        Self { listener, handshakes: JoinSet::new(), accept_at: Instant::now(), last_warning: None }
    }

    /// The next connection, whose handshake is complete. Cancel safe.
    pub(crate) async fn next(&mut self) -> Connection {
        loop {
            let accept = async {
                sleep_until(self.accept_at).await;
                self.listener.accept().await
            };
            let accepted = tokio::select! {
                Some(result) = self.handshakes.join_next() => {
                    match result {
                        Ok(Ok(Some(connection))) => return connection,
                        // Refused, or closed for another one.
                        Ok(Ok(None)) => {}
                        Ok(Err(error)) => self.log(error),
                        Err(error) => {
                            tracing::warn!(address = %self.listener.address(), %error, "TLS handshake failed");
                        }
                    }
                    continue;
                }
                accepted = accept => accepted,
            };
            match accepted {
                Ok(Accepted::Local(stream, identity)) => {
                    if let Some(admission) = self.listener.clients.admit(identity) {
                        return Connection { stream, peer: Peer::LOCAL, admission };
                    }
                }
                Ok(Accepted::Tls(stream, client, tls)) => {
                    self.handshakes.spawn(handshake(tls, self.listener.clients.clone(), stream, client));
                }
                Err(error) => {
                    let address = self.listener.address();
                    tracing::warn!(%address, %error, retry_in = ?ACCEPT_BACKOFF, "accept failed");
                    // There may be no file descriptors left.
                    self.listener.clients.handshakes().close_one();
                    self.accept_at = Instant::now() + ACCEPT_BACKOFF;
                }
            }
        }
    }

    fn log(&mut self, HandshakeError { client, reason }: HandshakeError) {
        let address = self.listener.address();
        let is_repeated = self
            .last_warning
            .as_ref()
            .is_some_and(|(last, at)| *last == reason && at.elapsed() < LOG_DEDUP_INTERVAL);
        if is_repeated {
            tracing::debug!(%address, %client, error = reason, "TLS handshake failed");
        } else {
            tracing::warn!(%address, %client, error = reason, "TLS handshake failed");
            self.last_warning = Some((reason, Instant::now()));
        }
    }
}

/// The connection of a client; `None` if it must make room for another one, or there are too many.
async fn handshake(
    tls: Arc<ServerTls>,
    clients: Clients,
    stream: TcpStream,
    client: SocketAddr,
) -> Result<Option<Connection>, HandshakeError> {
    let mut place = clients.handshakes().admit(client.ip()).await;
    tokio::select! {
        _ = &mut place.closing => Ok(None),
        result = tls.handshake(stream) => match result {
            Ok((stream, peer)) => {
                let admission = clients.admit(peer.identity());
                Ok(admission.map(|admission| Connection { stream: Box::new(stream), peer, admission }))
            }
            Err(error) => Err(HandshakeError { client, reason: reason(&error) }),
        },
    }
}

fn reason(error: &io::Error) -> String {
    match error.get_ref().and_then(|it| it.downcast_ref()) {
        Some(rustls::Error::InvalidMessage(_)) => format!("{error}: not TLS, or corrupt"),
        _ => error.to_string(),
    }
}

pub(crate) struct Connection {
    pub(crate) stream: Box<dyn ByteStream>,
    pub(crate) peer: Peer,
    pub(crate) admission: Admission,
}
