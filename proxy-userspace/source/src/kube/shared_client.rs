//! The client that all reflectors and the recorder of Events share: one connection with HTTP/2, and one set of credentials.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;

use http::{Request, Response, header};
use kube::{Client, client::Body};
use tokio::{task::spawn_blocking, time::timeout};

use super::{
    client_config::{ClientConfig, ClientConfigError},
    timing::Timing,
    watch_error::{ErrorKind, WatchError},
};

/// The form of a response: whole objects.
pub(super) const JSON: &str = "application/json";
/// The encoding of a list: a server compresses those of more than 128 KiB, to less than a tenth (KEP-156).
pub(super) const GZIP: &str = "gzip";
/// The encoding of a watch: from Kubernetes 1.37 on each event would be a gzip member of its own, and the library decompresses
/// the first one only.
pub(super) const IDENTITY: &str = "identity";
/// How long a retry waits for the configuration to be read.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(1);
const USER_AGENT: &str = concat!("kube-proxy-ebpf/", env!("CARGO_PKG_VERSION"));

/// A client that can be replaced.
#[derive(Debug)]
pub(super) struct SharedClient {
    config: ClientConfig,
    timing: Timing,
    current: Mutex<NumberedClient>,
    /// Held while a client is made.
    reloading: tokio::sync::Mutex<()>,
}

/// A client, and how many there were before it.
#[derive(Clone)]
pub(super) struct NumberedClient {
    pub(super) client: Client,
    number: u64,
}

impl std::fmt::Debug for NumberedClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NumberedClient").field("number", &self.number).finish_non_exhaustive()
    }
}

impl NumberedClient {
    /// Waits for the head of a response in a form and an encoding, whatever its status; errors begin with `name`.
    pub(super) async fn get(
        &self,
        name: &str,
        uri: &str,
        form: &'static str,
        encoding: &'static str,
        limit: Duration,
    ) -> Result<Response<Body>, WatchError> {
        let request = Request::get(uri)
            .header(header::ACCEPT, form)
            .header(header::ACCEPT_ENCODING, encoding)
            .header(header::USER_AGENT, USER_AGENT)
            .body(Body::empty())
            .map_err(|it| WatchError::new(ErrorKind::Other, format!("{name}: {it}")))?;
        let Ok(response) = timeout(limit, self.client.send(request)).await else {
            let text = format!("{name}: no response within {limit:.0?}");
            return Err(WatchError::new(ErrorKind::NoResponse, text));
        };
        response.map_err(|it| WatchError::connection(name, &it))
    }
}

impl SharedClient {
    /// The first client, and the server's URL.
    pub(super) fn new(config: &ClientConfig, timing: Timing) -> Result<(http::Uri, Self), ClientConfigError> {
        let (server, client) = config.client(&timing)?;
        let current = Mutex::new(NumberedClient { client, number: 0 });
        Ok((
            server,
            Self { config: config.clone(), timing, current, reloading: tokio::sync::Mutex::default() },
        ))
    }

    pub(super) fn get(&self) -> NumberedClient {
        self.current.lock().clone()
    }

    /// Replaces a client that has failed: reads the configuration and the credentials again, once for all who have it.
    ///
    /// A credential plugin may take longer than [`RELOAD_TIMEOUT`]: the client is then replaced later, unless the server has refused
    /// its credentials, without which no request succeeds.
    pub(super) async fn reload(
        self: &Arc<Self>,
        failed: &NumberedClient,
        is_refused: bool,
    ) -> Result<(), String> {
        let mut reloaded = tokio::spawn(Arc::clone(self).replace(failed.number));
        let reloaded = match is_refused {
            true => reloaded.await,
            false => match timeout(RELOAD_TIMEOUT, &mut reloaded).await {
                Ok(it) => it,
                Err(_) => return Ok(()),
            },
        };
        reloaded.map_err(|it| it.to_string())?
    }

    async fn replace(self: Arc<Self>, failed: u64) -> Result<(), String> {
        let _turn = self.reloading.lock().await;
        if self.current.lock().number != failed {
            return Ok(());
        }
        let (config, timing) = (self.config.clone(), self.timing);
        let client = match config.reads_files() {
            true => spawn_blocking(move || config.client(&timing)).await.map_err(|it| it.to_string())?,
            false => config.client(&timing),
        };
        let (_, client) = client.map_err(|it| it.to_string())?;
        *self.current.lock() = NumberedClient { client, number: failed + 1 };
        Ok(())
    }
}
