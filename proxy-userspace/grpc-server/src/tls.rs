//! The server side of mutual TLS.
//!
//! Invariant: the handshake fails without a certificate from a trusted authority.

use std::{collections::BTreeSet, io, sync::Arc, time::Duration};

use proxy_contract::tls::{Credentials, Reloader, TlsError, TlsFiles, crypto_provider};
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        server::{NoServerSessionStorage, WebPkiClientVerifier},
        version::TLS13,
    },
    server::TlsStream,
};

use super::authz::Peer;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval at which the files are reloaded while no client connects, so that errors are reported early.
const RELOAD_INTERVAL: Duration = Duration::from_secs(10);

/// The server's certificate, the trusted authorities and the allow-list.
#[derive(Debug)]
pub struct ServerTls {
    config: Reloader<ServerConfig>,
    /// The names of the peers that may request more than their own node.
    allowed: BTreeSet<String>,
}

impl ServerTls {
    /// Accepts peers whose certificates come from the authorities in `files`.
    ///
    /// Each may request the node that its certificate names, or everything if one of its names is in `allowed`.
    pub fn new(files: TlsFiles, allowed: impl IntoIterator<Item = String>) -> Result<Self, TlsError> {
        Ok(Self { config: Reloader::new(files, config)?, allowed: allowed.into_iter().collect() })
    }

    pub(crate) async fn handshake(&self, stream: TcpStream) -> io::Result<(TlsStream<TcpStream>, Peer)> {
        let accept = TlsAcceptor::from(self.config.current()).accept(stream);
        let stream = timeout(HANDSHAKE_TIMEOUT, accept).await.map_err(|_| {
            io::Error::new(io::ErrorKind::TimedOut, format!("timed out after {HANDSHAKE_TIMEOUT:?}"))
        })??;
        let certificate = stream.get_ref().1.peer_certificates().and_then(|it| it.first());
        let certificate = certificate.ok_or_else(|| io::Error::other("the client has no certificate"))?;
        let peer = Peer::certified(certificate, &self.allowed);
        Ok((stream, peer))
    }

    /// Reloads the files periodically; never returns.
    pub(crate) async fn reload_periodically(&self) -> std::convert::Infallible {
        loop {
            sleep(RELOAD_INTERVAL).await;
            self.config.current();
        }
    }
}

fn config(credentials: &Credentials) -> Result<ServerConfig, String> {
    let build = || -> Result<_, Box<dyn std::error::Error>> {
        let authorities = Arc::clone(&credentials.authorities);
        let verifier = WebPkiClientVerifier::builder_with_provider(authorities, crypto_provider()).build()?;
        let mut config = ServerConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(credentials.chain.clone(), credentials.key.clone_key())?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        // No resumption: streams are long-lived, and each new connection must verify the certificate again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    };
    build().map_err(|it| it.to_string())
}
