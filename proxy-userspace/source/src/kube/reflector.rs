//! Follows one kind: lists it, watches it, and begins again wherever that ends.
//!
//! The one rule: nothing that goes wrong takes anything away.
//! EventType is known stays until the server says otherwise, in an event or by leaving it out of a complete list.

use std::{sync::Arc, time::Duration};

use http::{Request, Response, header};
use kube::{
    Client,
    api::{ListParams, WatchParams},
    client::Body,
    core::{Request as Path, Status},
};
use model::cluster::Rejected;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep_until, timeout};

use super::{
    Shared, Timing,
    client_config::ClientConfig,
    kind::Kind,
    store::Store,
    watch_error::{Backoff, ErrorKind, WatchError},
    watch_stream::{Event, EventType, Lines, Named, Page, object, whole},
};

/// How many objects a page of a list has.
const PAGE: u32 = 500;
/// How long the server lets a watch last, in seconds: this, and up to as much again as chance adds, so that not all
/// nodes come back at once.
const WATCH: (u32, u32) = (240, 50);
/// How much longer than that a watch may last before it is taken to be dead.
const SLACK: Duration = Duration::from_secs(15);
/// The most of an error's body that is read.
const ERROR_BODY: usize = 64 << 10;
/// A watch that ends sooner than this without a word is a failure.
const AT_ONCE: Duration = Duration::from_secs(1);

/// EventType the server is asked to leave out.
#[derive(Clone, Debug, Default)]
pub(super) struct Selectors {
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
    /// Whether all is well without the selection of fields, which older servers do not know.
    pub(super) fields_are_optional: bool,
}

/// Who follows one kind.
pub(super) struct Reflector<K: Kind> {
    access: Arc<ClientConfig>,
    client: Client,
    selectors: Selectors,
    timing: Timing,
    backoff: Backoff,
    shared: Arc<Shared>,
    store: Store<K>,
    /// EventType has been seen of the server's history; none if all must be listed.
    version: Option<String>,
    /// Whether lists are asked for as the beginning of a watch.
    streams: bool,
    /// Whether the watch has said something.
    is_alive: bool,
}

impl<K: Kind> Reflector<K> {
    pub(super) fn new(
        access: Arc<ClientConfig>,
        client: Client,
        selectors: Selectors,
        timing: Timing,
        shared: Arc<Shared>,
    ) -> Self {
        let backoff = Backoff::new(timing.backoff);
        Self {
            access,
            client,
            selectors,
            timing,
            backoff,
            shared,
            store: Store::new(),
            version: None,
            streams: true,
            is_alive: false,
        }
    }

    /// Follows for ever.
    pub(super) async fn run(mut self) {
        let _guard = Guard(Arc::clone(&self.shared));
        loop {
            let began = Instant::now();
            self.is_alive = false;
            let failure = match self.session().await {
                Ok(()) if self.is_alive || began.elapsed() > AT_ONCE => continue,
                Ok(()) => {
                    WatchError::new(ErrorKind::Other, format!("{}: the watch was ended at once", K::PLURAL))
                }
                Err(failure) => failure,
            };
            if self.downgrade(&failure) {
                continue;
            }
            let next = self.backoff.failed(failure.retry_after);
            if failure.kind == ErrorKind::Gone {
                tracing::info!("{failure}; listing again");
                self.version = None;
            } else {
                self.shared.failed(K::INDEX, &failure.text, next);
            }
            sleep_until(next).await;
            if failure.kind == ErrorKind::Credentials {
                self.renew().await;
            }
        }
    }

    /// Does without what the server does not know; returns whether there is anything to do without.
    fn downgrade(&mut self, failure: &WatchError) -> bool {
        match failure.kind {
            ErrorKind::NoStreaming if self.streams => {
                tracing::debug!("{failure}; listing page by page");
                self.streams = false;
                true
            }
            ErrorKind::NoSelector
                if self.selectors.fields_are_optional && self.selectors.fields.is_some() =>
            {
                tracing::debug!("{failure}; selecting here");
                self.selectors.fields = None;
                true
            }
            _ => false,
        }
    }

    /// Reads anew who we are and where the server is.
    async fn renew(&mut self) {
        let access = Arc::clone(&self.access);
        // Files are read, and the kubeconfig may name a program to be run.
        match tokio::task::spawn_blocking(move || access.client()).await {
            Ok(Ok((_, client))) => self.client = client,
            Ok(Err(error)) => self.shared.failed(K::INDEX, &error.to_string(), Instant::now()),
            Err(error) => self.shared.failed(K::INDEX, &error.to_string(), Instant::now()),
        }
    }

    /// Lists if need be, and watches until the watch ends.
    async fn session(&mut self) -> Result<(), WatchError> {
        if self.version.is_none() && !self.streams {
            self.list().await?;
        }
        self.watch().await
    }

    /// Page by page.
    async fn list(&mut self) -> Result<(), WatchError> {
        self.store.list_begins();
        let mut next = None;
        loop {
            let parameters = ListParams {
                label_selector: self.selectors.labels.clone(),
                field_selector: self.selectors.fields.clone(),
                limit: Some(PAGE),
                continue_token: next.take(),
                ..ListParams::default()
            };
            let mut body = self.get(Path::new(K::PATH).list(&parameters)).await?;
            let bytes = whole(&mut body, K::PLURAL, self.timing.timeout, usize::MAX).await?;
            let page: Page<'_> = serde_json::from_slice(&bytes).map_err(|it| Self::nonsense(&it))?;
            for item in page.items.unwrap_or_default() {
                self.set(item)?;
            }
            next = page.metadata.next.filter(|it| !it.is_empty());
            if next.is_none() {
                self.listed(page.metadata.resource_version);
                return Ok(());
            }
            self.shared.contact(K::INDEX);
        }
    }

    /// From where we are; or from the beginning, and then all there is comes first.
    async fn watch(&mut self) -> Result<(), WatchError> {
        let seconds = WATCH.0 + fastrand::u32(0..WATCH.1);
        let parameters = WatchParams {
            label_selector: self.selectors.labels.clone(),
            field_selector: self.selectors.fields.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: self.version.is_none(),
        };
        if self.version.is_none() {
            self.store.list_begins();
        }
        let version = self.version.as_deref().unwrap_or("");
        let body = self.get(Path::new(K::PATH).watch(&parameters, version)).await?;
        let deadline = Instant::now() + Duration::from_secs(seconds.into()) + SLACK;
        let mut lines = Lines::new(body);
        loop {
            let patience = match self.version {
                None => self.timing.timeout,
                Some(_) => deadline.saturating_duration_since(Instant::now()),
            };
            let more = lines.read(K::PLURAL, patience, |line| self.event(line)).await;
            // EventType came before a failure has been said all the same.
            self.tell();
            if !more? {
                break;
            }
        }
        match self.version {
            Some(_) => Ok(()),
            // A server that does not know what it was asked for has watched and sent no end of the list.
            None => Err(WatchError::new(
                ErrorKind::NoStreaming,
                format!("{}: the list ended without its end", K::PLURAL),
            )),
        }
    }

    fn event(&mut self, line: &[u8]) -> Result<(), WatchError> {
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let event: Event<'_> = serde_json::from_slice(line).map_err(|it| self.lost(&it))?;
        self.is_alive = true;
        match event.what {
            EventType::Added | EventType::Modified => {
                let version = self.set(event.object)?;
                self.advance(version);
            }
            EventType::Deleted => {
                let Named { metadata } = self.named(event.object)?;
                self.store.delete(&K::name(&metadata));
                self.advance(metadata.resource_version);
            }
            EventType::Bookmark => {
                let Named { metadata } = self.named(event.object)?;
                let annotations = metadata.annotations.unwrap_or_default();
                if self.version.is_some() {
                    self.advance(metadata.resource_version);
                } else if annotations.initial_events_end.as_deref() == Some("true") {
                    self.listed(metadata.resource_version);
                }
            }
            EventType::Error => {
                let status: Status = serde_json::from_str(event.object.get()).map_err(|it| self.lost(&it))?;
                return Err(WatchError::event(K::PLURAL, &status));
            }
        }
        Ok(())
    }

    /// Takes an object over, and returns its version.
    fn set(&mut self, text: &RawValue) -> Result<Option<String>, WatchError> {
        match object::<K::Object>(text) {
            Ok(object) => {
                let metadata = K::metadata(&object);
                self.store.set(K::name(metadata), K::convert(&object));
                Ok(metadata.resource_version.clone())
            }
            Err(reason) => {
                let Named { metadata } = self.named(text)?;
                let name = K::name(&metadata);
                let rejected = Rejected {
                    item: format!("{} {name}", K::KIND),
                    reason: format!("{reason}; what it said before is kept, correct the field"),
                };
                self.store.keep(&name, rejected);
                Ok(metadata.resource_version)
            }
        }
    }

    fn named(&mut self, text: &RawValue) -> Result<Named, WatchError> {
        serde_json::from_str(text.get()).map_err(|it| self.lost(&it))
    }

    /// The list is complete.
    fn listed(&mut self, version: Option<String>) {
        self.store.list_ends();
        // Without a version there is nothing to go on from, and the next session lists again.
        self.version = version.filter(|it| !it.is_empty());
        self.backoff.reset();
        self.tell();
    }

    /// An event has been seen. While a list streams in, the version is that of its end.
    fn advance(&mut self, version: Option<String>) {
        if self.version.is_some() && version.as_deref().is_some_and(|it| !it.is_empty()) {
            self.version = version;
            self.backoff.reset();
        }
    }

    /// Hands over what is new.
    fn tell(&mut self) {
        self.shared.tell(&mut self.store);
    }

    /// The stream cannot be trusted any more.
    fn lost(&mut self, error: &serde_json::Error) -> WatchError {
        self.version = None;
        Self::nonsense(error)
    }

    fn nonsense(error: &serde_json::Error) -> WatchError {
        let text = format!("{}: the server has sent something that cannot be read: {error}", K::PLURAL);
        WatchError::new(ErrorKind::Other, text)
    }

    async fn get(
        &self,
        request: Result<Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<Body, WatchError> {
        let what = K::PLURAL;
        let mut request =
            request.map_err(|it| WatchError::new(ErrorKind::Other, format!("{what}: {it}")))?.map(Body::from);
        let headers = request.headers_mut();
        headers.insert(header::ACCEPT, header::HeaderValue::from_static("application/json"));
        headers.insert(header::USER_AGENT, header::HeaderValue::from_static(USER_AGENT));
        let Ok(response) = timeout(self.timing.timeout, self.client.send(request)).await else {
            let text = format!("{what}: no answer within {:.0?}", self.timing.timeout);
            return Err(WatchError::new(ErrorKind::Credentials, text));
        };
        let response: Response<Body> = response.map_err(|it| WatchError::connection(what, &it))?;
        let (parts, mut body) = response.into_parts();
        if parts.status.is_success() {
            self.shared.contact(K::INDEX);
            return Ok(body);
        }
        let said = whole(&mut body, what, self.timing.timeout, ERROR_BODY).await.unwrap_or_default();
        Err(WatchError::status(what, parts.status, &parts.headers, &said))
    }
}

const USER_AGENT: &str = concat!("kube-proxy-ebpf/", env!("CARGO_PKG_VERSION"));

/// Tells the reader that nothing more will come, however it ends.
struct Guard(Arc<Shared>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.broken();
    }
}
