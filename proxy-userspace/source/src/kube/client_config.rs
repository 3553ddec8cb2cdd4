//! How to get to the API server: where it is, and who we say we are.
//!
//! The one rule: whatever is wrong is named with its file or value, and with what would do.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::{HeaderValue, header::AUTHORIZATION};
use hyper_util::{
    client::legacy::{Client as Http, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client, Config,
    client::{Body, ConfigExt as _},
    config::{InClusterError, Kubeconfig, KubeconfigError},
};
use tower::{BoxError, ServiceBuilder};

use super::watch_error::chain;

/// How long to try to connect to one address.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a connection is silent before the other side is asked whether it is still there, how often it is asked
/// then, and how often in vain: a machine that vanished is noticed after half a minute.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);

/// Where the API server is and who asks.
#[derive(Clone, Debug, Default)]
pub struct ClientConfig {
    /// A kubeconfig, or several in the way that `$KUBECONFIG` lists them; without one, what a pod is given.
    pub kubeconfig: Option<OsString>,
    /// The server to ask, whatever the kubeconfig or the pod's environment says.
    pub server: Option<String>,
}

/// Why the API server cannot even be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientConfigError {
    /// A kubeconfig cannot be read, or is none.
    #[error("kubeconfig {}: {reason}; {remedy}", path.to_string_lossy())]
    Kubeconfig {
        /// The file, or the list of files.
        path: OsString,
        /// EventType is wrong.
        reason: String,
        /// EventType would do.
        remedy: &'static str,
    },
    /// The address is none.
    #[error("{0:?} is not the address of an API server; write it as https://192.0.2.1:6443")]
    Server(String),
    /// There is nothing to go by.
    #[error(
        "there is no kubeconfig, and this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set); give \
         --kubeconfig or --kube-api-server"
    )]
    Nothing,
    /// EventType a pod is given is not complete.
    #[error(
        "what this pod was given to reach the API server cannot be used: {0}; mount a service account's token, or give --kubeconfig"
    )]
    Pod(String),
    /// A token cannot be read.
    #[error(
        "token file {path}: {reason}; mount the service account's token, or name another in the kubeconfig as tokenFile"
    )]
    Token {
        /// The file.
        path: String,
        /// EventType is wrong.
        reason: String,
    },
    /// Certificates, keys or tokens that cannot be used.
    #[error(
        "what is to be shown to {server} cannot be used: {reason}; correct the certificate, key or token"
    )]
    Credentials {
        /// The server's address.
        server: String,
        /// EventType is wrong.
        reason: String,
    },
}

impl ClientConfig {
    /// The server's address, and a client for it; files are read again each time.
    ///
    /// Must be called within a tokio runtime.
    pub(super) fn client(&self) -> Result<(http::Uri, Client), ClientConfigError> {
        let mut config = self.config()?;
        let server = config.cluster_url.clone();
        let wrong = |error: kube::Error| ClientConfigError::Credentials {
            server: server.to_string(),
            reason: chain(&error),
        };
        if let Some(proxy) = &config.proxy_url {
            tracing::warn!(
                "{server} is asked directly, not through the proxy {proxy}: proxies are not supported"
            );
        }
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_keepalive(Some(KEEPALIVE.0));
        tcp.set_keepalive_interval(Some(KEEPALIVE.1));
        tcp.set_keepalive_retries(Some(KEEPALIVE.2));
        let token = config.auth_info.token_file.take().map(TokenFile::new).transpose()?;
        let tls = config.rustls_https_connector_with_connector(tcp).map_err(wrong)?;
        let service = ServiceBuilder::new()
            .layer(config.base_uri_layer())
            .option_layer(config.auth_layer().map_err(wrong)?)
            .map_request(move |request| match &token {
                Some(token) => token.show(request),
                None => request,
            })
            .layer(config.extra_headers_layer().map_err(wrong)?)
            .map_err(BoxError::from)
            .service(Http::builder(TokioExecutor::new()).build::<_, Body>(tls));
        Ok((server, Client::new(service, config.default_namespace)))
    }

    fn config(&self) -> Result<Config, ClientConfigError> {
        let server = self.server.as_deref().map(server).transpose()?;
        let mut config = match (&self.kubeconfig, &server) {
            (Some(path), _) => from_kubeconfig(path)?,
            (None, _) if env::var_os("KUBERNETES_SERVICE_HOST").is_some() => from_pod()?,
            // As with `kubectl proxy`: whoever answers there needs no more.
            (None, Some(server)) => Config::new(server.clone()),
            (None, None) => return Err(ClientConfigError::Nothing),
        };
        if let Some(server) = server {
            config.cluster_url = server;
        }
        Ok(config)
    }
}

/// A token in a file, which is read again for each request: there are few of them, and tokens are renewed in place.
///
/// (The client library's own reading stumbles over the line break at the end of a file.)
#[derive(Clone, Debug)]
struct TokenFile {
    path: String,
    last: Arc<Mutex<HeaderValue>>,
}

impl TokenFile {
    fn new(path: String) -> Result<Self, ClientConfigError> {
        match Self::read(&path) {
            Ok(token) => Ok(Self { path, last: Arc::new(Mutex::new(token)) }),
            Err(reason) => Err(ClientConfigError::Token { path, reason }),
        }
    }

    fn read(path: &str) -> Result<HeaderValue, String> {
        let text = fs::read_to_string(path).map_err(|it| it.to_string())?;
        let value = format!("Bearer {}", text.trim());
        let mut value = HeaderValue::try_from(value).map_err(|_| "it is not a token".to_owned())?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Adds the token; the last good one if the file cannot be read.
    fn show(&self, mut request: http::Request<Body>) -> http::Request<Body> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match Self::read(&self.path) {
            Ok(token) => *last = token,
            Err(reason) => tracing::warn!("token file {}: {reason}; the last one is shown", self.path),
        }
        request.headers_mut().insert(AUTHORIZATION, last.clone());
        request
    }
}

fn server(text: &str) -> Result<http::Uri, ClientConfigError> {
    let uri = text.parse::<http::Uri>().ok();
    uri.filter(|it| matches!(it.scheme_str(), Some("http" | "https")) && it.host().is_some())
        .ok_or_else(|| ClientConfigError::Server(text.to_owned()))
}

fn from_pod() -> Result<Config, ClientConfigError> {
    Config::incluster().map_err(|error: InClusterError| ClientConfigError::Pod(chain(&error)))
}

fn from_kubeconfig(paths: &OsStr) -> Result<Config, ClientConfigError> {
    let wrong = |path: &Path, error: KubeconfigError| ClientConfigError::Kubeconfig {
        path: path.into(),
        reason: match &error {
            KubeconfigError::ReadConfig(error, _) => error.to_string(),
            // The parser's own words have a drawing of the place.
            other => chain(other).lines().next().unwrap_or_default().to_owned(),
        },
        remedy: remedy(&error),
    };
    let mut merged: Option<Kubeconfig> = None;
    for path in env::split_paths(paths).filter(|it| !it.as_os_str().is_empty()) {
        let path: &PathBuf = &path;
        let next = Kubeconfig::read_from(path).map_err(|it| wrong(path, it))?;
        merged = Some(match merged {
            Some(before) => before.merge(next).map_err(|it| wrong(path, it))?,
            None => next,
        });
    }
    let config = Config::try_from(merged.unwrap_or_default()).map_err(|it| wrong(Path::new(paths), it))?;
    server(&config.cluster_url.to_string()).map(|_| config)
}

fn remedy(error: &KubeconfigError) -> &'static str {
    match error {
        KubeconfigError::ReadConfig(..) | KubeconfigError::FindPath => {
            "name a file that can be read with --kubeconfig"
        }
        KubeconfigError::Parse(_) | KubeconfigError::KindMismatch | KubeconfigError::ApiVersionMismatch => {
            "write it as `kubectl config view --raw` shows it"
        }
        KubeconfigError::CurrentContextNotSet => "set one with `kubectl config use-context`",
        KubeconfigError::LoadContext(_) | KubeconfigError::LoadClusterOfContext(_) => {
            "current-context must name a context, and that a cluster, which are in the file"
        }
        KubeconfigError::MissingClusterUrl | KubeconfigError::ParseClusterUrl(_) => {
            "write the cluster's server as https://192.0.2.1:6443"
        }
        _ => "correct it",
    }
}
