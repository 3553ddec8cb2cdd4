//! Flags for mutual TLS: what this side shows, and whom it trusts.
//!
//! The one rule: half a set of flags is wrong usage, never less security.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Result, anyhow};
use clap::Args;
use proxy_contract::{
    client::Client,
    tls::{ClientTls, TlsError, TlsFile, TlsFiles},
};
use publish::grpc::ServerTls;

/// How a brain knows its clients, beyond this host.
#[derive(Clone, Debug, Args)]
pub(super) struct ServerFlags {
    /// The certificate to show at ports, with those that lead to its authority (PEM)
    ///
    /// With it, every port speaks mutual TLS; without it, only ports of loopback addresses are served. The files are
    /// read again when they change, and no connection notices. A socket in the file system needs no TLS.
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TLS_CERT", requires_all = ["tls_key", "tls_client_ca"])]
    tls_cert: Option<PathBuf>,
    /// The key of --tls-cert (PEM)
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// The authorities that clients' certificates must come from (PEM)
    ///
    /// A client may ask for the node that its certificate names: by a DNS name, a URI (system:node:NAME, or one that
    /// ends in /node/NAME) or the common name system:node:NAME.
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TLS_CLIENT_CA", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Clients who may ask for every node and for the whole cluster: common names, DNS names or URIs as they stand in
    /// their certificates
    #[arg(
        long,
        value_name = "NAME",
        env = "KUBE_PROXY_EBPF_TLS_ALLOW",
        value_delimiter = ',',
        requires = "tls_cert"
    )]
    tls_allow: Vec<String>,
}

impl ServerFlags {
    /// The same for the server; none if nothing was said.
    pub(super) fn server(&self) -> Result<Option<Arc<ServerTls>>> {
        let files = files(self.tls_cert.as_ref(), self.tls_key.as_ref(), self.tls_client_ca.as_ref());
        let Some(files) = files else { return Ok(None) };
        let allowed = self.tls_allow.iter().filter(|it| !it.is_empty()).cloned();
        let tls = ServerTls::new(files, allowed).map_err(|it| named(&it, "--tls-client-ca"))?;
        Ok(Some(Arc::new(tls)))
    }
}

/// How a client knows its brain, beyond this host.
#[derive(Clone, Debug, Args)]
pub(super) struct ClientFlags {
    /// The authorities that the brain's certificate must come from (PEM); with it, --target is spoken to over mutual TLS
    ///
    /// The files are read again at each connect. A socket in the file system needs no TLS.
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TARGET_TLS_CA", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// The certificate to show to the brain, with those that lead to its authority (PEM)
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TARGET_TLS_CERT", requires = "tls_ca")]
    tls_cert: Option<PathBuf>,
    /// The key of --tls-cert (PEM)
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TARGET_TLS_KEY", requires = "tls_ca")]
    tls_key: Option<PathBuf>,
    /// The name that the brain's certificate must have [default: the host of --target]
    #[arg(long, value_name = "NAME", env = "KUBE_PROXY_EBPF_TARGET_TLS_SERVER_NAME", requires = "tls_ca")]
    tls_server_name: Option<String>,
}

impl ClientFlags {
    /// A client that does as was said.
    pub(super) fn client(&self, client: Client) -> Result<Client> {
        let files = files(self.tls_cert.as_ref(), self.tls_key.as_ref(), self.tls_ca.as_ref());
        let Some(files) = files else { return Ok(client) };
        let tls = ClientTls::new(files).map_err(|it| named(&it, "--tls-ca"))?;
        let tls = match &self.tls_server_name {
            Some(name) => tls.server_name(name).map_err(|it| anyhow!("--tls-server-name: {it}"))?,
            None => tls,
        };
        Ok(client.tls(tls))
    }

    /// The flags as they would be typed again.
    pub(super) fn words(&self) -> String {
        let files =
            [("--tls-ca", &self.tls_ca), ("--tls-cert", &self.tls_cert), ("--tls-key", &self.tls_key)];
        let files =
            files.into_iter().filter_map(|(flag, it)| Some((flag, it.as_ref()?.display().to_string())));
        let name = self.tls_server_name.clone().map(|it| ("--tls-server-name", it));
        files.chain(name).map(|(flag, value)| format!(" {flag} {value}")).collect()
    }
}

/// How another brain is known that is a source.
#[derive(Clone, Debug, Args)]
pub(super) struct SourceFlags {
    /// The authorities that the certificate of the brain in --source api:TARGET must come from (PEM); with it, that brain
    /// is spoken to over mutual TLS
    ///
    /// The files are read again at each connect. A socket in the file system needs no TLS.
    #[arg(
        long,
        value_name = "FILE",
        env = "KUBE_PROXY_EBPF_SOURCE_TLS_CA",
        requires_all = ["source_tls_cert", "source_tls_key"]
    )]
    source_tls_ca: Option<PathBuf>,
    /// The certificate to show to the brain in --source, with those that lead to its authority (PEM)
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_SOURCE_TLS_CERT", requires = "source_tls_ca")]
    source_tls_cert: Option<PathBuf>,
    /// The key of --source-tls-cert (PEM)
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_SOURCE_TLS_KEY", requires = "source_tls_ca")]
    source_tls_key: Option<PathBuf>,
    /// The name that the certificate of the brain in --source must have [default: the host of its address]
    #[arg(
        long,
        value_name = "NAME",
        env = "KUBE_PROXY_EBPF_SOURCE_TLS_SERVER_NAME",
        requires = "source_tls_ca"
    )]
    source_tls_server_name: Option<String>,
}

impl SourceFlags {
    /// A client that does as was said.
    pub(super) fn client(&self, client: Client) -> Result<Client> {
        let files =
            files(self.source_tls_cert.as_ref(), self.source_tls_key.as_ref(), self.source_tls_ca.as_ref());
        let Some(files) = files else { return Ok(client) };
        let tls = ClientTls::new(files).map_err(|error| {
            let flag = match error.part {
                TlsFile::Certificate => "--source-tls-cert",
                TlsFile::Key => "--source-tls-key",
                TlsFile::Authorities => "--source-tls-ca",
            };
            anyhow!("{flag} {error}")
        })?;
        let tls = match &self.source_tls_server_name {
            Some(name) => tls.server_name(name).map_err(|it| anyhow!("--source-tls-server-name: {it}"))?,
            None => tls,
        };
        Ok(client.tls(tls))
    }
}

/// All three, or nothing: the flags require each other.
fn files(
    certificate: Option<&PathBuf>,
    key: Option<&PathBuf>,
    authorities: Option<&PathBuf>,
) -> Option<TlsFiles> {
    let (certificate, key, authorities) = (certificate?.clone(), key?.clone(), authorities?.clone());
    Some(TlsFiles { certificate, key, authorities })
}

/// The error with the flag that it is about.
fn named(error: &TlsError, authorities: &str) -> anyhow::Error {
    let flag = match error.part {
        TlsFile::Certificate => "--tls-cert",
        TlsFile::Key => "--tls-key",
        TlsFile::Authorities => authorities,
    };
    anyhow!("{flag} {error}")
}
