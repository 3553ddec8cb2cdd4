//! Lists and watches one resource, and starts again whenever that ends.
//!
//! Invariant: no failure removes an object. Objects are removed by a delete event, or if a complete list does not contain
//! them.

use std::{sync::Arc, time::Duration};

use http::{Request, Response, header};
use kube::{
    Client,
    api::{ListParams, WatchParams},
    client::Body,
    core::{Request as Path, Status},
};
use model::Rejected;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep_until, timeout};

use super::{
    backoff::Backoff,
    client_config::ClientConfig,
    options::{Options, Selectors, Timing},
    resource::Resource,
    shared::Shared,
    store::Store,
    watch_error::{ErrorKind, WatchError},
    watch_stream::{EventType, Lines, Page, PartialObject, WatchEvent, decode, read_all},
};

/// Number of objects in a page of a list.
const PAGE_SIZE: u32 = 500;
/// Duration of a watch in seconds: the first number, and up to the second one more at random, so that not all nodes
/// reconnect at once.
const WATCH_SECONDS: (u32, u32) = (240, 50);
/// How much longer a watch may last before it is considered dead.
const WATCH_SLACK: Duration = Duration::from_secs(15);
/// How much of the body of an error response is read, in bytes.
const MAX_ERROR_BODY: usize = 64 << 10;
/// A watch without events that ends sooner than this has failed.
const MIN_WATCH: Duration = Duration::from_secs(1);
const USER_AGENT: &str = concat!("kube-proxy-ebpf/", env!("CARGO_PKG_VERSION"));

/// Keeps a copy of all objects of one resource.
pub(super) struct Reflector<R: Resource> {
    client_config: ClientConfig,
    client: Client,
    selectors: Selectors,
    timing: Timing,
    backoff: Backoff,
    shared: Arc<Shared>,
    store: Store<R>,
    /// The resource version to continue from; `None` if everything must be listed.
    version: Option<String>,
    /// Whether lists are requested as the start of a watch (KEP-3157).
    uses_watch_list: bool,
    /// Whether the watch has sent an event.
    has_events: bool,
}

impl<R: Resource> Reflector<R> {
    pub(super) fn new(
        options: &Options,
        client: &Client,
        selectors: Selectors,
        shared: &Arc<Shared>,
    ) -> Self {
        Self {
            client_config: options.client_config.clone(),
            client: client.clone(),
            selectors,
            timing: options.timing,
            backoff: Backoff::new(options.timing.backoff),
            shared: Arc::clone(shared),
            store: Store::new(),
            version: None,
            uses_watch_list: true,
            has_events: false,
        }
    }

    /// Runs for ever.
    pub(super) async fn run(mut self) {
        let _guard = BrokenGuard(Arc::clone(&self.shared));
        loop {
            let start = Instant::now();
            self.has_events = false;
            let error = match self.session().await {
                Ok(()) if self.has_events || start.elapsed() > MIN_WATCH => continue,
                Ok(()) => {
                    let text = format!("{}: the API server ended the watch at once", R::PLURAL);
                    WatchError::new(ErrorKind::Other, text)
                }
                Err(error) => error,
            };
            if self.downgrade(&error) {
                continue;
            }
            let next = self.backoff.failed(error.retry_after);
            if error.kind == ErrorKind::Expired {
                tracing::info!("{error}; listing again");
                self.version = None;
            } else {
                self.shared.failed(R::INDEX, &error.text, next);
            }
            sleep_until(next).await;
            if error.kind == ErrorKind::Connection {
                self.reload_config().await;
            }
        }
    }

    /// Stops using the feature that the server does not support; returns whether there is one.
    fn downgrade(&mut self, error: &WatchError) -> bool {
        match error.kind {
            ErrorKind::NoWatchList if self.uses_watch_list => {
                tracing::debug!("{error}; listing in pages");
                self.uses_watch_list = false;
                true
            }
            ErrorKind::NoFieldSelector
                if self.selectors.fields_are_optional && self.selectors.fields.is_some() =>
            {
                tracing::debug!("{error}; watching without the field selector");
                self.selectors.fields = None;
                true
            }
            _ => false,
        }
    }

    /// Reads the client configuration and the credentials again.
    async fn reload_config(&mut self) {
        let config = self.client_config.clone();
        // Blocks: files are read, and the kubeconfig may run a credential plugin.
        let error = match tokio::task::spawn_blocking(move || config.client()).await {
            Ok(Ok((_, client))) => {
                self.client = client;
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        self.shared.failed(R::INDEX, &error, Instant::now());
    }

    /// Lists if necessary, and watches until the watch ends.
    async fn session(&mut self) -> Result<(), WatchError> {
        if self.version.is_none() && !self.uses_watch_list {
            self.list().await?;
        }
        self.watch().await
    }

    /// Lists in pages.
    async fn list(&mut self) -> Result<(), WatchError> {
        self.store.begin_list();
        let mut continue_token = None;
        loop {
            let parameters = ListParams {
                label_selector: self.selectors.labels.clone(),
                field_selector: self.selectors.fields.clone(),
                limit: Some(PAGE_SIZE),
                continue_token: continue_token.take(),
                ..ListParams::default()
            };
            let mut body = self.get(Path::new(R::PATH).list(&parameters)).await?;
            let bytes = read_all(&mut body, R::PLURAL, self.timing.timeout, usize::MAX).await?;
            let page: Page<'_> = serde_json::from_slice(&bytes).map_err(|it| Self::invalid(&it))?;
            for item in page.items.unwrap_or_default() {
                self.set(item)?;
            }
            continue_token = page.metadata.continue_.filter(|it| !it.is_empty());
            if continue_token.is_none() {
                self.listed(page.metadata.resource_version);
                return Ok(());
            }
            self.shared.contact(R::INDEX);
        }
    }

    /// Watches from the known resource version; without one, the watch starts with a list.
    async fn watch(&mut self) -> Result<(), WatchError> {
        let seconds = WATCH_SECONDS.0 + fastrand::u32(0..WATCH_SECONDS.1);
        let parameters = WatchParams {
            label_selector: self.selectors.labels.clone(),
            field_selector: self.selectors.fields.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: self.version.is_none(),
        };
        if self.version.is_none() {
            self.store.begin_list();
        }
        let version = self.version.as_deref().unwrap_or("");
        let body = self.get(Path::new(R::PATH).watch(&parameters, version)).await?;
        let deadline = Instant::now() + Duration::from_secs(seconds.into()) + WATCH_SLACK;
        let mut lines = Lines::new(body);
        loop {
            let limit = match self.version {
                None => self.timing.timeout,
                Some(_) => deadline.saturating_duration_since(Instant::now()),
            };
            let more = lines.read(R::PLURAL, limit, |line| self.event(line)).await;
            // Events before an error are valid.
            self.shared.publish(&mut self.store);
            if !more? {
                break;
            }
        }
        match self.version {
            Some(_) => Ok(()),
            // A server that ignores the request for a list watches only, and never marks the end of a list.
            None => Err(WatchError::new(
                ErrorKind::NoWatchList,
                format!("{}: the watch ended before the list was complete", R::PLURAL),
            )),
        }
    }

    fn event(&mut self, line: &[u8]) -> Result<(), WatchError> {
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let event: WatchEvent<'_> = serde_json::from_slice(line).map_err(|it| self.out_of_sync(&it))?;
        self.has_events = true;
        match event.event_type {
            EventType::Added | EventType::Modified => {
                let version = self.set(event.object)?;
                self.advance(version);
            }
            EventType::Deleted => {
                let PartialObject { metadata } = self.partial(event.object)?;
                self.store.delete(&R::name(&metadata));
                self.advance(metadata.resource_version);
            }
            EventType::Bookmark => {
                let PartialObject { metadata } = self.partial(event.object)?;
                let annotations = metadata.annotations.unwrap_or_default();
                if self.version.is_some() {
                    self.advance(metadata.resource_version);
                } else if annotations.initial_events_end.as_deref() == Some("true") {
                    self.listed(metadata.resource_version);
                }
            }
            EventType::Error => {
                let status: Status =
                    serde_json::from_str(event.object.get()).map_err(|it| self.out_of_sync(&it))?;
                return Err(WatchError::event(R::PLURAL, &status));
            }
        }
        Ok(())
    }

    /// Stores an object and returns its resource version.
    fn set(&mut self, text: &RawValue) -> Result<Option<String>, WatchError> {
        match decode::<R>(text) {
            Ok(object) => {
                let metadata = object.metadata();
                self.store.set(R::name(metadata), object.convert());
                Ok(metadata.resource_version.clone())
            }
            Err(reason) => {
                let PartialObject { metadata } = self.partial(text)?;
                let name = R::name(&metadata);
                let rejected = Rejected {
                    item: format!("{} {name}", R::KIND),
                    reason: format!("{reason}; the last valid version stays active"),
                };
                self.store.keep(&name, rejected);
                Ok(metadata.resource_version)
            }
        }
    }

    fn partial(&mut self, text: &RawValue) -> Result<PartialObject, WatchError> {
        serde_json::from_str(text.get()).map_err(|it| self.out_of_sync(&it))
    }

    /// The list is complete.
    fn listed(&mut self, version: Option<String>) {
        self.store.end_list();
        // Without a version, the next session lists again.
        self.version = version.filter(|it| !it.is_empty());
        self.backoff.reset();
        self.shared.publish(&mut self.store);
    }

    /// Continues from the version of an event. While a list is read, its end has the version.
    fn advance(&mut self, version: Option<String>) {
        if self.version.is_some() && version.as_deref().is_some_and(|it| !it.is_empty()) {
            self.version = version;
            self.backoff.reset();
        }
    }

    /// An event cannot be decoded, not even its name: list again.
    fn out_of_sync(&mut self, error: &serde_json::Error) -> WatchError {
        self.version = None;
        Self::invalid(error)
    }

    fn invalid(error: &serde_json::Error) -> WatchError {
        let text = format!("{}: the response of the API server cannot be decoded: {error}", R::PLURAL);
        WatchError::new(ErrorKind::Other, text)
    }

    async fn get(
        &self,
        request: Result<Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<Body, WatchError> {
        let mut request = request
            .map_err(|it| WatchError::new(ErrorKind::Other, format!("{}: {it}", R::PLURAL)))?
            .map(Body::from);
        let headers = request.headers_mut();
        headers.insert(header::ACCEPT, header::HeaderValue::from_static("application/json"));
        headers.insert(header::USER_AGENT, header::HeaderValue::from_static(USER_AGENT));
        let Ok(response) = timeout(self.timing.timeout, self.client.send(request)).await else {
            let text = format!("{}: no response within {:.0?}", R::PLURAL, self.timing.timeout);
            return Err(WatchError::new(ErrorKind::Connection, text));
        };
        let response: Response<Body> = response.map_err(|it| WatchError::connection(R::PLURAL, &it))?;
        let (parts, mut body) = response.into_parts();
        if parts.status.is_success() {
            self.shared.contact(R::INDEX);
            return Ok(body);
        }
        let body = read_all(&mut body, R::PLURAL, self.timing.timeout, MAX_ERROR_BODY).await;
        Err(WatchError::status(R::PLURAL, parts.status, &parts.headers, &body.unwrap_or_default()))
    }
}

/// Tells the reader that a reflector has ended, for whatever reason.
struct BrokenGuard(Arc<Shared>);

impl Drop for BrokenGuard {
    fn drop(&mut self) {
        self.0.broken();
    }
}
