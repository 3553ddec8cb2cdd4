//! Where the API server is, how it is connected to, and the credentials.
//!
//! An error names the file or value, and the remedy.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

use http::{HeaderValue, Uri, header::AUTHORIZATION};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{
        Client as HttpClient, ResponseFuture,
        connect::{Connect, Connected, Connection, HttpConnector},
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use kube::{
    Client, Config,
    client::{Body, ConfigExt as _},
    config::{InClusterError, Kubeconfig, KubeconfigError},
};
use model::error_chain;
use tokio::io::{AsyncRead, AsyncWrite};
use tower::{BoxError, ServiceBuilder, service_fn, util::BoxCloneSyncService};
use tower_http::decompression::DecompressionLayer;

use super::{
    http_proxy::{Proxy, Route, route},
    renewed_credentials::RenewedCredentials,
    request_metrics::RequestMetrics,
    timing::Timing,
};

/// Timeout of connecting: a server that returns is connected to within this time, and the delay of a retry.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// TCP keepalive: idle time before the first probe, interval of the probes, and their number. A host that has vanished is
/// noticed after half a minute.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);

#[derive(Clone, Debug, Default)]
pub struct ClientConfig {
    /// A kubeconfig, or several in the format of `$KUBECONFIG`; by default the pod's service account.
    pub kubeconfig: Option<OsString>,
    /// The URL of the API server; overrides the kubeconfig and the pod's environment.
    pub server: Option<String>,
    /// How to connect to it; by default over TCP, with TLS if its URL says so.
    pub connector: Option<Connector>,
    pub requests: RequestMetrics,
}

/// Why a client configuration is unusable: what is wrong with which file or value, and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ClientConfigError(String);

impl ClientConfig {
    /// The server's URL and a client for it; files are read on each call.
    ///
    /// Must be called within a tokio runtime.
    pub(super) fn client(&self, timing: &Timing) -> Result<(Uri, Client), ClientConfigError> {
        let mut config = self.config()?;
        let server = config.cluster_url.clone();
        let invalid = |error: kube::Error| {
            let reason = error_chain(&error);
            ClientConfigError(format!(
                "the credentials for {server} cannot be used: {reason}; correct the certificate, key or token"
            ))
        };
        // The client library takes the environment for a part of the kubeconfig, without exceptions.
        let explicit = config.proxy_url.take().map(|it| it.to_string()).filter(|it| !is_of_environment(it));
        let proxy = Proxy::of(&server, explicit.as_deref())
            .map_err(|reason| ClientConfigError(format!("{server} cannot be reached: {reason}")))?;
        if let Some(proxy) = &proxy {
            tracing::info!(%server, proxy = proxy.address(), "connecting to the API server through a proxy");
        }
        let token = config.auth_info.token_file.take().map(TokenFile::new).transpose()?;
        let has_plugin = config.auth_info.exec.is_some() || config.auth_info.auth_provider.is_some();
        let auth = config.auth_layer().map_err(invalid)?;
        let (auth, renewed) = match has_plugin {
            true => (None, auth.map(|it| RenewedCredentials::start(it, timing))),
            false => (auth, None),
        };
        if renewed.is_some() {
            // The plugin has given a token: it is not run once more for a certificate.
            config.auth_info.exec = None;
        }
        let send = match &self.connector {
            Some(connector) => sender(connector.clone(), timing),
            None => {
                let route = route(tcp(), proxy.as_ref());
                sender(https_connector(&config, route).map_err(invalid)?, timing)
            }
        };
        let requests = self.requests.clone();
        let service = ServiceBuilder::new()
            .layer(config.base_uri_layer())
            .layer(DecompressionLayer::new())
            .option_layer(auth)
            .map_request(move |request| match &token {
                Some(token) => token.add_to(request),
                None => request,
            })
            .layer(config.extra_headers_layer().map_err(invalid)?)
            .map_err(BoxError::from)
            .service(service_fn(move |request: http::Request<Body>| {
                let (renewed, requests, send) = (renewed.clone(), requests.clone(), Arc::clone(&send));
                async move {
                    let request = match &renewed {
                        Some(it) => it.add_to(request).await?,
                        None => request,
                    };
                    let count = requests.begin(&request);
                    let answer = send(request).await;
                    count(answer.as_ref().ok().map(http::Response::status));
                    answer.map_err(BoxError::from)
                }
            }));
        Ok((server, Client::new(service, config.default_namespace)))
    }

    /// Whether making a client may block: files are read, and the kubeconfig may run a credential plugin.
    pub(super) fn reads_files(&self) -> bool {
        self.kubeconfig.is_some() || is_in_pod()
    }

    fn config(&self) -> Result<Config, ClientConfigError> {
        let server = self.server.as_deref().map(parse_server).transpose()?;
        let mut config = match (&self.kubeconfig, &server) {
            (Some(path), _) => from_kubeconfig(path)?,
            (None, _) if is_in_pod() => from_pod()?,
            // Without credentials, as for `kubectl proxy`.
            (None, Some(server)) => Config::new(server.clone()),
            (None, None) => {
                return Err(ClientConfigError(
                    "no kubeconfig is given and this is not a pod of a cluster (KUBERNETES_SERVICE_HOST is not set); \
                     set --kubeconfig or --kube-api-server"
                        .into(),
                ));
            }
        };
        if let Some(server) = server {
            config.cluster_url = server;
        }
        Ok(config)
    }
}

/// A token file, read again for each request: requests are few, and tokens are renewed in place.
///
/// (The client library's own reader fails on a trailing line break.)
#[derive(Clone, Debug)]
struct TokenFile {
    path: String,
    last_valid: Arc<Mutex<HeaderValue>>,
}

impl TokenFile {
    fn new(path: String) -> Result<Self, ClientConfigError> {
        match Self::read(&path) {
            Ok(token) => Ok(Self { path, last_valid: Arc::new(Mutex::new(token)) }),
            Err(reason) => Err(ClientConfigError(format!(
                "token file {path}: {reason}; mount the service account's token, or set tokenFile in the kubeconfig to \
                 another file"
            ))),
        }
    }

    fn read(path: &str) -> Result<HeaderValue, String> {
        let text = fs::read_to_string(path).map_err(|it| it.to_string())?;
        let value = format!("Bearer {}", text.trim());
        let mut value = HeaderValue::try_from(value).map_err(|_| "the content is not a token".to_owned())?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Adds the token, or the last valid one if the file cannot be read.
    fn add_to(&self, mut request: http::Request<Body>) -> http::Request<Body> {
        let mut last_valid = self.last_valid.lock();
        match Self::read(&self.path) {
            Ok(token) => *last_valid = token,
            Err(error) => {
                tracing::warn!(
                    file = self.path,
                    error,
                    "cannot read the token file; using the last valid token"
                );
            }
        }
        request.headers_mut().insert(AUTHORIZATION, last_valid.clone());
        request
    }
}

fn is_in_pod() -> bool {
    env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

/// What sends requests over connections of a connector.
fn sender<C>(
    connector: C,
    timing: &Timing,
) -> Arc<dyn Fn(http::Request<Body>) -> ResponseFuture + Send + Sync>
where
    C: Connect + Clone + Send + Sync + 'static,
{
    // Behind a load balancer, a connection without a server looks like an idle one.
    let client = HttpClient::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .http2_keep_alive_interval(timing.ping.0)
        .http2_keep_alive_timeout(timing.ping.1)
        .build::<_, Body>(connector);
    Arc::new(move |request| client.request(request))
}

fn tcp() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE.0));
    tcp.set_keepalive_interval(Some(KEEPALIVE.1));
    tcp.set_keepalive_retries(Some(KEEPALIVE.2));
    tcp
}

/// A connector with HTTP/2, which that of the client library lacks.
fn https_connector(config: &Config, route: Route) -> Result<HttpsConnector<Route>, kube::Error> {
    let builder =
        HttpsConnectorBuilder::new().with_tls_config(config.rustls_client_config()?).https_or_http();
    let builder = match &config.tls_server_name {
        Some(name) => {
            let name = name.clone().try_into().map_err(|it| kube::Error::Service(Box::new(it)))?;
            builder.with_server_name_resolver(FixedServerNameResolver::new(name))
        }
        None => builder,
    };
    Ok(builder.enable_all_versions().wrap_connector(route))
}

/// Whether a proxy is that of HTTPS_PROXY.
fn is_of_environment(url: &str) -> bool {
    let same = |name| {
        let value = env::var(name).unwrap_or_default();
        value.parse::<Uri>().is_ok_and(|it| it == *url)
    };
    same("HTTPS_PROXY") || same("https_proxy")
}

fn parse_server(text: &str) -> Result<Uri, ClientConfigError> {
    let uri = text.parse::<Uri>().ok();
    uri.filter(|it| matches!(it.scheme_str(), Some("http" | "https")) && it.host().is_some()).ok_or_else(
        || {
            let hint = "write it as https://192.0.2.1:6443";
            ClientConfigError(format!("{text:?} is not the URL of an API server; {hint}"))
        },
    )
}

fn from_pod() -> Result<Config, ClientConfigError> {
    Config::incluster().map_err(|error: InClusterError| {
        let reason = error_chain(&error);
        ClientConfigError(format!(
            "the pod's service account cannot be used: {reason}; mount a service account token, or set --kubeconfig"
        ))
    })
}

fn from_kubeconfig(paths: &OsStr) -> Result<Config, ClientConfigError> {
    let invalid = |path: &Path, error: KubeconfigError| {
        let reason = match &error {
            KubeconfigError::ReadConfig(error, _) => error.to_string(),
            // The parser's message continues with an excerpt of the file.
            other => error_chain(other).lines().next().unwrap_or_default().to_owned(),
        };
        ClientConfigError(format!("kubeconfig {}: {reason}; {}", path.display(), remedy(&error)))
    };
    let mut merged: Option<Kubeconfig> = None;
    for path in env::split_paths(paths).filter(|it| !it.as_os_str().is_empty()) {
        let path: &PathBuf = &path;
        let next = Kubeconfig::read_from(path).map_err(|it| invalid(path, it))?;
        merged = Some(match merged {
            Some(first) => first.merge(next).map_err(|it| invalid(path, it))?,
            None => next,
        });
    }
    let config = Config::try_from(merged.unwrap_or_default()).map_err(|it| invalid(Path::new(paths), it))?;
    parse_server(&config.cluster_url.to_string()).map(|_| config)
}

fn remedy(error: &KubeconfigError) -> &'static str {
    match error {
        KubeconfigError::ReadConfig(..) | KubeconfigError::FindPath => "set --kubeconfig to a readable file",
        KubeconfigError::Parse(_) | KubeconfigError::KindMismatch | KubeconfigError::ApiVersionMismatch => {
            "write it in the format of `kubectl config view --raw`"
        }
        KubeconfigError::CurrentContextNotSet => "set it with `kubectl config use-context`",
        KubeconfigError::LoadContext(_) | KubeconfigError::LoadClusterOfContext(_) => {
            "current-context must name a context in the file, and the context a cluster in the file"
        }
        KubeconfigError::MissingClusterUrl | KubeconfigError::ParseClusterUrl(_) => {
            "set the cluster's server, as in https://192.0.2.1:6443"
        }
        _ => "correct it",
    }
}

/// A connection to an API server other than over TCP: through a tunnel, or in memory. What it carries is HTTP as it is, TLS is up to
/// the connection.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {
    /// Whether both ends have agreed on HTTP/2.
    fn has_http2(&self) -> bool;
}

impl Connection for Box<dyn ByteStream> {
    fn connected(&self) -> Connected {
        let connected = Connected::new();
        if self.has_http2() { connected.negotiated_h2() } else { connected }
    }
}

/// Makes connections to an API server. Clones make the same ones.
pub type Connector = BoxCloneSyncService<Uri, TokioIo<Box<dyn ByteStream>>, io::Error>;

pub fn connect_with<F, S>(connect: impl Fn() -> F + Clone + Send + Sync + 'static) -> Connector
where
    F: Future<Output = io::Result<S>> + Send + 'static,
    S: ByteStream + 'static,
{
    BoxCloneSyncService::new(service_fn(move |_: Uri| {
        let connecting = connect();
        async { connecting.await.map(|it| TokioIo::new(Box::new(it) as Box<dyn ByteStream>)) }
    }))
}
