//! Mutual TLS: a certificate, its key and the trusted authorities, from files that are reloaded when they change.
//!
//! Invariant: the last valid set of files stays in use until there is a new valid set.
//! A file that is missing, incomplete, or does not match the others changes nothing, and is reported once.
//!
//! The files are PEM, as cert-manager, kubelet and openssl write them, and may be behind symbolic links.
//! They are read for each new connection; established connections are not affected.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustls::{
    RootCertStore,
    crypto::{CryptoProvider, ring},
    pki_types::{
        CertificateDer, PrivateKeyDer, ServerName,
        pem::{self, PemObject as _},
    },
    sign::CertifiedKey,
};
use tonic::transport::{ClientTlsConfig, Identity};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The paths of the three files. See [`ClientTls`] for an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by its intermediate certificates.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
    /// The certificates of the authorities that must have issued the peer's certificate.
    pub authorities: PathBuf,
}

/// One of [`TlsFiles`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsFile {
    /// The certificate.
    Certificate,
    /// The private key.
    Key,
    /// The authorities.
    Authorities,
}

/// Why the files cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", .path.display())]
pub struct TlsError {
    /// The file that cannot be used.
    pub file: TlsFile,
    /// The path of the file.
    pub path: PathBuf,
    /// Why the file cannot be used.
    pub reason: String,
}

/// The text is not a valid server name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a DNS name nor an IP address")]
pub struct NameError(pub String);

/// The content of a valid set of files.
#[derive(Debug)]
pub struct Credentials {
    /// The certificate and its intermediate certificates.
    pub chain: Vec<CertificateDer<'static>>,
    /// The private key.
    pub key: PrivateKeyDer<'static>,
    /// The trusted authorities.
    pub authorities: Arc<RootCertStore>,
    /// Chain and key as PEM.
    identity: Identity,
}

/// The bytes of the files, in the order of the fields of [`TlsFiles`].
type Contents = [Vec<u8>; 3];

impl TlsFiles {
    fn path(&self, file: TlsFile) -> &Path {
        match file {
            TlsFile::Certificate => &self.certificate,
            TlsFile::Key => &self.key,
            TlsFile::Authorities => &self.authorities,
        }
    }

    fn error(&self, file: TlsFile, reason: impl fmt::Display) -> TlsError {
        TlsError { file, path: self.path(file).to_owned(), reason: reason.to_string() }
    }

    fn read(&self) -> Result<Contents, TlsError> {
        let read = |file| fs::read(self.path(file)).map_err(|it| self.error(file, it));
        Ok([read(TlsFile::Certificate)?, read(TlsFile::Key)?, read(TlsFile::Authorities)?])
    }

    fn parse(&self, [chain_pem, key_pem, authorities]: &Contents) -> Result<Credentials, TlsError> {
        let chain = self.certificates(TlsFile::Certificate, chain_pem)?;
        let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(|it| {
            let reason = match it {
                pem::Error::NoItemsFound => "contains no PEM private key".to_owned(),
                other => format!("invalid PEM: {other}"),
            };
            self.error(TlsFile::Key, reason)
        })?;
        CertifiedKey::from_der(chain.clone(), key.clone_key(), &crypto_provider()).map_err(
            |it| match it {
                rustls::Error::InconsistentKeys(_) => {
                    let certificate = self.certificate.display();
                    self.error(TlsFile::Key, format!("does not match the certificate in {certificate}"))
                }
                rustls::Error::InvalidCertificate(_) => self.error(TlsFile::Certificate, it),
                _ => self.error(TlsFile::Key, it),
            },
        )?;
        let mut roots = RootCertStore::empty();
        for it in self.certificates(TlsFile::Authorities, authorities)? {
            roots.add(it).map_err(|it| self.error(TlsFile::Authorities, it))?;
        }
        let identity = Identity::from_pem(chain_pem, key_pem);
        Ok(Credentials { chain, key, authorities: Arc::new(roots), identity })
    }

    fn certificates(&self, file: TlsFile, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem)
            .collect::<Result<_, _>>()
            .map_err(|it| self.error(file, format!("invalid PEM: {it}")))?;
        if certificates.is_empty() {
            return Err(self.error(file, "contains no PEM certificate"));
        }
        Ok(certificates)
    }
}

/// The cryptography of both clients and servers.
#[must_use]
pub fn crypto_provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// A value built from files, which is rebuilt when they change.
///
/// ```no_run
/// use proxy_contract::tls::{Reloader, TlsError, TlsFiles};
///
/// fn certificates(files: TlsFiles) -> Result<Reloader<usize>, TlsError> {
///     Reloader::new(files, |it| Ok(it.chain.len()))
/// }
/// # fn example(files: TlsFiles) -> Result<(), TlsError> {
/// println!("{} certificates in the chain", certificates(files)?.current());
/// # Ok(())
/// # }
/// ```
pub struct Reloader<T> {
    files: TlsFiles,
    build: fn(&Credentials) -> Result<T, String>,
    loaded: Mutex<Loaded<T>>,
}

struct Loaded<T> {
    value: Arc<T>,
    /// The contents that it was built from.
    contents: Contents,
    /// The last error that was logged, as long as it persists.
    reported: Option<TlsError>,
}

impl<T> fmt::Debug for Reloader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloader").field("files", &self.files).finish_non_exhaustive()
    }
}

impl<T> Reloader<T> {
    /// Reads the files, which must be valid now.
    pub fn new(files: TlsFiles, build: fn(&Credentials) -> Result<T, String>) -> Result<Self, TlsError> {
        let contents = files.read()?;
        let value = Arc::new(build_from(&files, &contents, build)?);
        Ok(Self { files, build, loaded: Mutex::new(Loaded { value, contents, reported: None }) })
    }

    /// Reads the files again; returns the value of the last valid contents.
    pub fn current(&self) -> Arc<T> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        match self.reload(&loaded.contents) {
            Ok(None) => loaded.reported = None,
            Ok(Some((contents, value))) => {
                tracing::info!(certificate = %self.files.certificate.display(), "certificates reloaded");
                *loaded = Loaded { value: Arc::new(value), contents, reported: None };
            }
            Err(error) => {
                if loaded.reported.as_ref() != Some(&error) {
                    tracing::warn!(%error, "certificates are invalid; the previous ones stay in use");
                    loaded.reported = Some(error);
                }
            }
        }
        Arc::clone(&loaded.value)
    }

    /// The contents and their value, if they have changed.
    fn reload(&self, before: &Contents) -> Result<Option<(Contents, T)>, TlsError> {
        let contents = self.files.read()?;
        if contents == *before {
            return Ok(None);
        }
        let error = match build_from(&self.files, &contents, self.build) {
            Ok(value) => return Ok(Some((contents, value))),
            Err(error) => error,
        };
        // They may have been replaced while they were being read.
        let again = self.files.read()?;
        if again == contents {
            return Err(error);
        }
        build_from(&self.files, &again, self.build).map(|value| Some((again, value)))
    }
}

fn build_from<T>(
    files: &TlsFiles,
    contents: &Contents,
    build: fn(&Credentials) -> Result<T, String>,
) -> Result<T, TlsError> {
    build(&files.parse(contents)?).map_err(|it| files.error(TlsFile::Certificate, it))
}

/// The client side of mutual TLS. The files are read for each connection.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use proxy_contract::{client::Client, tls::{ClientTls, TlsFiles}};
///
/// let files = TlsFiles {
///     certificate: "/etc/proxy/tls.crt".into(),
///     key: "/etc/proxy/tls.key".into(),
///     authorities: "/etc/proxy/ca.crt".into(),
/// };
/// let client = Client::new("brain.kube-system:7443".parse()?, "node-1").tls(ClientTls::new(files)?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ClientTls {
    config: Arc<Reloader<ClientTlsConfig>>,
    server_name: Option<String>,
}

impl ClientTls {
    /// Reads the files. The brain's certificate must contain the host name of the target.
    pub fn new(files: TlsFiles) -> Result<Self, TlsError> {
        let build = |it: &Credentials| {
            let anchors = it.authorities.roots.iter().cloned();
            let config = ClientTlsConfig::new().trust_anchors(anchors).identity(it.identity.clone());
            Ok(config.timeout(HANDSHAKE_TIMEOUT))
        };
        Ok(Self { config: Arc::new(Reloader::new(files, build)?), server_name: None })
    }

    /// Expects this DNS name or IP address in the brain's certificate instead of the host name.
    pub fn server_name(self, name: &str) -> Result<Self, NameError> {
        ServerName::try_from(name).map_err(|_| NameError(name.to_owned()))?;
        Ok(Self { server_name: Some(name.to_owned()), ..self })
    }

    /// The configuration for a new connection to `host`.
    pub(crate) fn config(&self, host: &str) -> ClientTlsConfig {
        let name = self.server_name.as_deref().unwrap_or(host);
        ClientTlsConfig::clone(&self.config.current()).domain_name(name)
    }
}
