//! Mutual TLS: a certificate, its key and the authorities to trust, out of files that are read again when they change.
//!
//! The one rule: the last good set stays until there is a better one.
//! A file that is missing, half written, or does not belong to the others changes nothing, and is reported once.
//!
//! The files are PEM, as cert-manager, kubelet and openssl write them; links may be swapped beneath them.
//! They are looked at whenever a connection begins, and no connection that is there notices.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
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

use crate::client::PATIENCE;

/// Where the three are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate to show, followed by those that lead from it to an authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The certificates of the authorities that the other side's certificate must come from.
    pub authorities: PathBuf,
}

/// One of [`TlsFiles`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsFile {
    /// The certificate.
    Certificate,
    /// Its key.
    Key,
    /// The authorities.
    Authorities,
}

/// Why files cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", .path.display())]
pub struct TlsError {
    /// Which of them.
    pub part: TlsFile,
    /// Its file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// Why a text cannot be the name of a server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a DNS name nor an address")]
pub struct NameError(pub String);

/// What a set of files says, and that it fits together.
#[derive(Debug)]
pub struct Credentials {
    /// The certificate to show, and those that lead from it to an authority.
    pub chain: Vec<CertificateDer<'static>>,
    /// Its private key.
    pub key: PrivateKeyDer<'static>,
    /// Whom to trust.
    pub authorities: Arc<RootCertStore>,
    /// Chain and key as they were written.
    identity: Identity,
}

/// The content of the files, in the order of their fields.
type Contents = [Vec<u8>; 3];

impl TlsFiles {
    fn path(&self, part: TlsFile) -> &Path {
        match part {
            TlsFile::Certificate => &self.certificate,
            TlsFile::Key => &self.key,
            TlsFile::Authorities => &self.authorities,
        }
    }

    fn error(&self, part: TlsFile, reason: impl fmt::Display) -> TlsError {
        TlsError { part, path: self.path(part).to_owned(), reason: reason.to_string() }
    }

    fn read(&self) -> Result<Contents, TlsError> {
        let read = |part| fs::read(self.path(part)).map_err(|it| self.error(part, it));
        Ok([read(TlsFile::Certificate)?, read(TlsFile::Key)?, read(TlsFile::Authorities)?])
    }

    fn parse(&self, [chain_pem, key_pem, authorities]: &Contents) -> Result<Credentials, TlsError> {
        let chain = self.certificates(TlsFile::Certificate, chain_pem)?;
        let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(|it| {
            let reason = match it {
                pem::Error::NoItemsFound => "there is no private key in it (PEM)".to_owned(),
                other => format!("it cannot be read as PEM: {other}"),
            };
            self.error(TlsFile::Key, reason)
        })?;
        CertifiedKey::from_der(chain.clone(), key.clone_key(), &provider()).map_err(|it| match it {
            rustls::Error::InconsistentKeys(_) => {
                let certificate = self.certificate.display();
                self.error(TlsFile::Key, format!("it is not the key of the certificate in {certificate}"))
            }
            rustls::Error::InvalidCertificate(_) => self.error(TlsFile::Certificate, it),
            _ => self.error(TlsFile::Key, it),
        })?;
        let mut roots = RootCertStore::empty();
        for it in self.certificates(TlsFile::Authorities, authorities)? {
            roots.add(it).map_err(|it| self.error(TlsFile::Authorities, it))?;
        }
        let identity = Identity::from_pem(chain_pem, key_pem);
        Ok(Credentials { chain, key, authorities: Arc::new(roots), identity })
    }

    fn certificates(&self, part: TlsFile, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem)
            .collect::<Result<_, _>>()
            .map_err(|it| self.error(part, format!("it cannot be read as PEM: {it}")))?;
        if certificates.is_empty() {
            return Err(self.error(part, "there is no certificate in it (PEM)"));
        }
        Ok(certificates)
    }
}

/// The cryptography that is used, for both sides.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// What is made of files, made again when they change.
pub struct Reloader<T> {
    files: TlsFiles,
    make: fn(&Credentials) -> Result<T, String>,
    state: Mutex<State<T>>,
}

struct State<T> {
    made: Arc<T>,
    /// What it is made of.
    contents: Contents,
    /// What was said about the files last, if they are no good.
    complaint: Option<TlsError>,
}

impl<T> fmt::Debug for Reloader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloader").field("files", &self.files).finish_non_exhaustive()
    }
}

impl<T> Reloader<T> {
    /// Reads the files for the first time: now they must be good.
    pub fn new(files: TlsFiles, make: fn(&Credentials) -> Result<T, String>) -> Result<Self, TlsError> {
        let contents = files.read()?;
        let made = Arc::new(make_of(&files, &contents, make)?);
        Ok(Self { files, make, state: Mutex::new(State { made, contents, complaint: None }) })
    }

    /// What the files say now, or said when they were good last.
    pub fn current(&self) -> Arc<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match self.renewed(&state.contents) {
            Ok(None) => state.complaint = None,
            Ok(Some((contents, made))) => {
                tracing::info!("{}: the certificates have been read anew", self.files.certificate.display());
                *state = State { made: Arc::new(made), contents, complaint: None };
            }
            Err(error) => {
                if state.complaint.as_ref() != Some(&error) {
                    tracing::warn!("{error}; what was read before stays in use");
                    state.complaint = Some(error);
                }
            }
        }
        Arc::clone(&state.made)
    }

    /// What other contents of the files mean.
    fn renewed(&self, before: &Contents) -> Result<Option<(Contents, T)>, TlsError> {
        let contents = self.files.read()?;
        if contents == *before {
            return Ok(None);
        }
        let error = match make_of(&self.files, &contents, self.make) {
            Ok(made) => return Ok(Some((contents, made))),
            Err(error) => error,
        };
        // They may have been exchanged between the reading of one and that of the next.
        let again = self.files.read()?;
        if again == contents {
            return Err(error);
        }
        make_of(&self.files, &again, self.make).map(|made| Some((again, made)))
    }
}

fn make_of<T>(
    files: &TlsFiles,
    contents: &Contents,
    make: fn(&Credentials) -> Result<T, String>,
) -> Result<T, TlsError> {
    make(&files.parse(contents)?).map_err(|it| files.error(TlsFile::Certificate, it))
}

/// How a client shows who it is, and knows the brain.
///
/// The files are read at each connect; what is connected is not touched by what they say by then.
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
    /// Reads the files; the brain's certificate must name the host that is connected to.
    pub fn new(files: TlsFiles) -> Result<Self, TlsError> {
        let make = |it: &Credentials| {
            let anchors = it.authorities.roots.iter().cloned();
            let config = ClientTlsConfig::new().trust_anchors(anchors).identity(it.identity.clone());
            Ok(config.timeout(PATIENCE))
        };
        Ok(Self { config: Arc::new(Reloader::new(files, make)?), server_name: None })
    }

    /// Another name that the brain's certificate must have instead: a DNS name or an address.
    pub fn server_name(self, name: &str) -> Result<Self, NameError> {
        ServerName::try_from(name).map_err(|_| NameError(name.to_owned()))?;
        Ok(Self { server_name: Some(name.to_owned()), ..self })
    }

    /// For a connection to `host` that begins now.
    pub(crate) fn config(&self, host: &str) -> ClientTlsConfig {
        let name = self.server_name.as_deref().unwrap_or(host);
        ClientTlsConfig::clone(&self.config.current()).domain_name(name)
    }
}
