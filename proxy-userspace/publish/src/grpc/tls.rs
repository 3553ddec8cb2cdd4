//! Mutual TLS at the brain's side.
//!
//! The one rule: nobody without a certificate of the right authority gets beyond the handshake.

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

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How often the files are looked at while nobody connects, so that what is wrong with them is known early.
const LOOK: Duration = Duration::from_secs(10);

/// Whom to let in, and what the brain shows of itself.
#[derive(Debug)]
pub struct ServerTls {
    config: Reloader<ServerConfig>,
    /// Names of those who may ask for more than their own node.
    allowed: BTreeSet<String>,
}

impl ServerTls {
    /// Lets those in whose certificates come from the authorities in `files`.
    ///
    /// Each may ask for the node that its certificate names, and for everything if one of its names is among `allowed`.
    pub fn new(files: TlsFiles, allowed: impl IntoIterator<Item = String>) -> Result<Self, TlsError> {
        Ok(Self { config: Reloader::new(files, config)?, allowed: allowed.into_iter().collect() })
    }

    pub(super) async fn handshake(&self, stream: TcpStream) -> io::Result<(TlsStream<TcpStream>, Peer)> {
        let accept = TlsAcceptor::from(self.config.current()).accept(stream);
        let stream = timeout(HANDSHAKE, accept).await.map_err(|_| {
            io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the handshake was not done within {HANDSHAKE:?}"),
            )
        })??;
        let certificate = stream.get_ref().1.peer_certificates().and_then(|it| it.first());
        let certificate = certificate.ok_or_else(|| io::Error::other("there is no certificate"))?;
        let peer = Peer::certified(certificate, &self.allowed);
        Ok((stream, peer))
    }

    /// Looks at the files now and then, for ever.
    pub(super) async fn look(&self) -> std::convert::Infallible {
        loop {
            sleep(LOOK).await;
            self.config.current();
        }
    }
}

fn config(credentials: &Credentials) -> Result<ServerConfig, String> {
    let make = || -> Result<_, Box<dyn std::error::Error>> {
        let authorities = Arc::clone(&credentials.authorities);
        let verifier = WebPkiClientVerifier::builder_with_provider(authorities, crypto_provider()).build()?;
        let mut config = ServerConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(credentials.chain.clone(), credentials.key.clone_key())?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        // Streams last; and who comes again shows again that his certificate is still good.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    };
    make().map_err(|it| it.to_string())
}
