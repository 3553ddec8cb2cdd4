//! A CA, and the server's certificate signed by it.
//!
//! Both are generated for each server, so that no server is trusted by another's CA.

use std::sync::Arc;

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig, crypto,
        pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    },
};

pub(crate) struct Identity {
    /// The CA's certificate, in PEM.
    pub(crate) ca: String,
    pub(crate) acceptor: TlsAcceptor,
}

impl Identity {
    pub(crate) fn new(has_http2: bool) -> Result<Self> {
        let mut parameters = CertificateParams::new(Vec::new())?;
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(parameters, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let certificate = CertificateParams::new(names)?.signed_by(&key, &ca)?;
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], private)?;
        let protocols: &[&[u8]] = if has_http2 { &[b"h2", b"http/1.1"] } else { &[b"http/1.1"] };
        config.alpn_protocols = protocols.iter().map(|it| it.to_vec()).collect();
        Ok(Self { ca: ca.pem(), acceptor: TlsAcceptor::from(Arc::new(config)) })
    }
}
