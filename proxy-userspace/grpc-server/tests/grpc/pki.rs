//! Certificate authorities and certificates.

use std::{fs, path::PathBuf};

use proxy_contract::tls::{ClientTls, TlsFiles};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
    date_time_ymd,
};
use tonic::transport;

/// The content of a certificate.
#[derive(Clone, Copy, Default)]
pub(crate) struct Subject<'a> {
    pub(crate) common_name: &'a str,
    pub(crate) dns: &'a [&'a str],
    pub(crate) uri: &'a [&'a str],
    pub(crate) is_expired: bool,
    /// Not valid for clients.
    pub(crate) is_for_servers: bool,
}

/// A certificate and its key, in PEM.
#[derive(Clone)]
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Pair {
    pub(crate) fn identity(&self) -> transport::Identity {
        transport::Identity::from_pem(&self.certificate, &self.key)
    }
}

pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    pub(crate) fn sign(&self, subject: Subject<'_>) -> Pair {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if !subject.common_name.is_empty() {
            params.distinguished_name.push(DnType::CommonName, subject.common_name);
        }
        let dns = subject.dns.iter().map(|it| SanType::DnsName((*it).try_into().unwrap()));
        let uri = subject.uri.iter().map(|it| SanType::URI((*it).try_into().unwrap()));
        params.subject_alt_names = dns.chain(uri).collect();
        if subject.is_expired {
            (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
        }
        if subject.is_for_servers {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Pair { certificate, key: key.serialize_pem() }
    }

    /// The certificate of a brain on this host.
    pub(crate) fn brain(&self) -> Pair {
        self.sign(Subject { dns: &["localhost", "brain.test"], ..Subject::default() })
    }

    /// The certificate of a node's agent.
    pub(crate) fn node(&self, node: &str) -> Pair {
        self.sign(Subject { common_name: &format!("system:node:{node}"), ..Subject::default() })
    }
}

/// The files of one peer.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new(pair: &Pair, authorities: &str) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.write(pair, authorities);
        folder
    }

    pub(crate) fn write(&self, pair: &Pair, authorities: &str) {
        let TlsFiles { certificate, key, authorities: file } = self.files();
        let contents = [(certificate, &*pair.certificate), (key, &*pair.key), (file, authorities)];
        contents.into_iter().for_each(|(path, text)| fs::write(path, text).unwrap());
    }

    pub(crate) fn files(&self) -> TlsFiles {
        let path = |name: &str| -> PathBuf { self.0.path().join(name) };
        TlsFiles { certificate: path("tls.crt"), key: path("tls.key"), authorities: path("ca.crt") }
    }

    pub(crate) fn client(&self) -> ClientTls {
        ClientTls::new(self.files()).unwrap()
    }
}
