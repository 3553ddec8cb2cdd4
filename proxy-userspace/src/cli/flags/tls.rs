//! Flags of mutual TLS.
//!
//! Invariant: an incomplete set of flags is wrong usage, never a weaker connection.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Result, anyhow};
use clap::Args;
use grpc_server::ServerTls;
use proxy_contract::{
    client::Client,
    tls::{ClientTls, TlsError, TlsFile, TlsFiles},
};

/// TLS of a gRPC server.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ServerTlsFlags {
    /// Server certificate, followed by its intermediate certificates (PEM); enables mutual TLS on all TCP addresses
    ///
    /// Without it, only loopback addresses are served. The files are reloaded when they change; open connections are not
    /// interrupted. Unix sockets do not use TLS.
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_client_ca"])]
    tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// CA certificates that client certificates must be signed by (PEM)
    ///
    /// A client may ask for the node that its certificate names: as a DNS name, as a URI (system:node:NAME, or ending in
    /// /node/NAME) or as the common name system:node:NAME.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Clients that may request every node and the cluster state, by the common name, DNS name or URI of their certificate;
    /// can be repeated
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "tls_cert")]
    tls_allow: Vec<String>,
}

impl ServerTlsFlags {
    /// The configuration of the server; `None` without flags.
    pub(in crate::cli) fn server(&self) -> Result<Option<Arc<ServerTls>>> {
        let Some(files) = files([&self.tls_cert, &self.tls_key, &self.tls_client_ca]) else {
            return Ok(None);
        };
        let allowed = self.tls_allow.iter().filter(|it| !it.is_empty()).cloned();
        let flags = ["--tls-cert", "--tls-key", "--tls-client-ca"];
        Ok(Some(Arc::new(ServerTls::new(files, allowed).map_err(|it| with_flag(&it, flags))?)))
    }
}

/// TLS of a client of the brain in `--target`.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ClientTlsFlags {
    /// CA certificates that the brain's certificate must be signed by (PEM); enables mutual TLS with --target
    ///
    /// The files are read again for each connection. Unix sockets do not use TLS.
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TARGET_TLS_CA", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// Client certificate, followed by its intermediate certificates (PEM)
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TARGET_TLS_CERT", requires = "tls_ca")]
    tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert (PEM)
    #[arg(long, value_name = "FILE", env = "KUBE_PROXY_EBPF_TARGET_TLS_KEY", requires = "tls_ca")]
    tls_key: Option<PathBuf>,
    /// Name that the brain's certificate must contain [default: the host of --target]
    #[arg(long, value_name = "NAME", env = "KUBE_PROXY_EBPF_TARGET_TLS_SERVER_NAME", requires = "tls_ca")]
    tls_server_name: Option<String>,
}

impl ClientTlsFlags {
    const FLAGS: [&str; 4] = ["--tls-cert", "--tls-key", "--tls-ca", "--tls-server-name"];

    /// The client, with TLS if the flags ask for it.
    pub(in crate::cli) fn client(&self, client: Client) -> Result<Client> {
        with_tls(client, [&self.tls_cert, &self.tls_key, &self.tls_ca], &self.tls_server_name, Self::FLAGS)
    }
}

/// TLS of a client of the brain in `--source api:TARGET`.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct SourceTlsFlags {
    /// CA certificates that the certificate of the brain in --source must be signed by (PEM); enables mutual TLS with it
    ///
    /// The files are read again for each connection. Unix sockets do not use TLS.
    #[arg(long, value_name = "FILE", requires_all = ["source_tls_cert", "source_tls_key"])]
    source_tls_ca: Option<PathBuf>,
    /// Client certificate for the brain in --source, followed by its intermediate certificates (PEM)
    #[arg(long, value_name = "FILE", requires = "source_tls_ca")]
    source_tls_cert: Option<PathBuf>,
    /// Private key of --source-tls-cert (PEM)
    #[arg(long, value_name = "FILE", requires = "source_tls_ca")]
    source_tls_key: Option<PathBuf>,
    /// Name that the certificate of the brain in --source must contain [default: the host of its address]
    #[arg(long, value_name = "NAME", requires = "source_tls_ca")]
    source_tls_server_name: Option<String>,
}

impl SourceTlsFlags {
    /// The client, with TLS if the flags ask for it.
    pub(in crate::cli) fn client(&self, client: Client) -> Result<Client> {
        let files = [&self.source_tls_cert, &self.source_tls_key, &self.source_tls_ca];
        let flags = ["--source-tls-cert", "--source-tls-key", "--source-tls-ca", "--source-tls-server-name"];
        with_tls(client, files, &self.source_tls_server_name, flags)
    }
}

/// The client with mutual TLS, if there are `files`: certificate, key and CA. `flags` are their names in errors, and that
/// of the server name's flag.
fn with_tls(
    client: Client,
    paths: [&Option<PathBuf>; 3],
    server_name: &Option<String>,
    [cert, key, ca, name]: [&str; 4],
) -> Result<Client> {
    let Some(files) = files(paths) else { return Ok(client) };
    let mut tls = ClientTls::new(files).map_err(|it| with_flag(&it, [cert, key, ca]))?;
    if let Some(server_name) = server_name {
        tls = tls.server_name(server_name).map_err(|it| anyhow!("{name}: {it}"))?;
    }
    Ok(client.tls(tls))
}

/// Certificate, key and CA: all of them or none, because the flags require each other.
fn files([certificate, key, authorities]: [&Option<PathBuf>; 3]) -> Option<TlsFiles> {
    Some(TlsFiles { certificate: certificate.clone()?, key: key.clone()?, authorities: authorities.clone()? })
}

/// The error, with the flag of the file that it is about.
fn with_flag(error: &TlsError, [cert, key, ca]: [&str; 3]) -> anyhow::Error {
    let flag = match error.file {
        TlsFile::Certificate => cert,
        TlsFile::Key => key,
        TlsFile::Authorities => ca,
    };
    anyhow!("{flag} {error}")
}
