//! Lists and watches one resource, and starts again whenever that ends.
//!
//! Invariant: no failure removes an object. Objects are removed by a delete event, or if a complete list does not contain
//! them.

use std::{fmt, mem, sync::Arc, time::Duration};

use form_urlencoded::Serializer;
use http::Version;
use kube::{client::Body, core::Status};
use model::{Rejected, RequestedMetadata};
use serde_json::value::RawValue;
use tokio::time::Instant;
use tracing::{Instrument as _, debug_span};

use super::{
    backoff::Backoff,
    list_items::ListItems,
    options::{Options, Selectors},
    resource::Resource,
    shared::Shared,
    shared_client::{GZIP, IDENTITY, JSON, NumberedClient, SharedClient},
    store::Store,
    timing::Timing,
    watch_error::{ErrorKind, WatchError, quoted},
    watch_stream::{EventType, Lines, PartialObject, WatchEvent, next_data, read_all},
};
use crate::{kube_types::Kind, text::one_line};

const PAGE_SIZE: &str = "500";
/// The resource version of a list that may be of any age: the server answers from memory.
const ANY_VERSION: &str = "0";
const NOT_OLDER: &str = "NotOlderThan";
/// Duration of a watch on a connection that is pinged; up to a fifth more at random, so that not all nodes reconnect at
/// once.
const WATCH: Duration = Duration::from_secs(240);
/// How much of the body of an error response is read, in bytes.
const MAX_ERROR_BODY: usize = 64 << 10;
/// A watch without events that ends sooner than this has failed.
const MIN_WATCH: Duration = Duration::from_secs(1);

/// Objects without their specs and states: for a list, and for the events of a watch.
const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

#[derive(Clone, Copy)]
enum Verb {
    List,
    Watch,
}

/// What a reflector does next.
enum State {
    /// Lists objects of any age, as the server has them in memory: nothing is known.
    ListAny,
    /// Lists objects that are not older than this version, so that time does not go backwards.
    ListNotOlderThan(String),
    /// Lists the newest objects, for which the server asks its database: it did not have a version, or went back in time.
    ListNewest,
    /// Watches from this version.
    Watch(String),
}

impl State {
    /// The version to continue from; `None` if everything must be listed.
    fn version(&self) -> Option<&str> {
        match self {
            Self::Watch(version) => Some(version),
            _ => None,
        }
    }
}

/// Keeps a copy of all objects of one resource.
pub(super) struct Reflector {
    resource: &'static Resource,
    client: Arc<SharedClient>,
    /// The client of the last request.
    used: NumberedClient,
    selectors: Selectors,
    requested: RequestedMetadata,
    timing: Timing,
    backoff: Backoff,
    shared: Arc<Shared>,
    pub(super) store: Store,
    state: State,
    /// Whether the API server may have gone back to older data since: after an outage.
    may_be_restored: bool,
    /// From when on lists are requested as the start of a watch (KEP-3157).
    streams_from: Instant,
    /// Whether the connection is pinged, as HTTP/2 allows.
    is_pinged: bool,
    has_events: bool,
    /// Whether it was logged that an optional resource is not available.
    is_missing: bool,
}

impl Reflector {
    pub(super) fn new(
        options: &Options,
        client: &Arc<SharedClient>,
        resource: &'static Resource,
        selectors: Selectors,
        shared: &Arc<Shared>,
    ) -> Self {
        Self {
            resource,
            client: Arc::clone(client),
            used: client.get(),
            selectors,
            requested: options.service_metadata.clone(),
            timing: options.timing,
            backoff: Backoff::new(options.timing.backoff),
            shared: Arc::clone(shared),
            store: Store::default(),
            state: State::ListAny,
            may_be_restored: false,
            streams_from: Instant::now(),
            is_pinged: false,
            has_events: false,
            is_missing: false,
        }
    }

    /// Runs forever.
    pub(super) async fn run(mut self) {
        loop {
            let start = Instant::now();
            self.has_events = false;
            let streams = start >= self.streams_from;
            let error = match self.session(streams).await {
                Ok(()) if self.has_events || start.elapsed() > MIN_WATCH => continue,
                Ok(()) => {
                    let text = format!("{}: the API server ended the watch at once", self.resource.plural);
                    WatchError::new(ErrorKind::Other, text)
                }
                Err(error) => error,
            };
            // Older servers do not support the field selector of Services.
            if error.kind == ErrorKind::BadRequest
                && self.resource.kind == Kind::Service
                && self.selectors.fields.take().is_some()
            {
                tracing::debug!(%error, "watching without the field selector");
                continue;
            }
            if streams && self.state.version().is_none() && error.kind.concerns_request() {
                self.streams_from = Instant::now() + self.timing.streaming_retry;
                tracing::info!(%error, "the next list is not a streaming one");
                // A server that answers is asked for an ordinary list at once, which is no outage.
                if error.kind != ErrorKind::NoResponse {
                    continue;
                }
            }
            self.recover(&error).await;
        }
    }

    /// Waits until it is time for another try.
    async fn recover(&mut self, error: &WatchError) {
        let is_soon = error.kind.is_unreachable() || self.shared.is_starting(self.resource.index());
        let mut next = self.backoff.failed(error.retry_after, self.timing.max_delay(is_soon));
        if error.kind == ErrorKind::Expired {
            tracing::info!(%error, "listing again");
            self.state = match mem::replace(&mut self.state, State::ListNewest) {
                State::Watch(version) => State::ListNotOlderThan(version),
                _ => State::ListNewest,
            };
        } else if let Some(consequence) = self.resource.consequence {
            next = self.missing(error, consequence, next);
        } else {
            self.shared.failed(self.resource.index(), error, next);
        }
        self.may_be_restored |= error.kind.is_unreachable();
        self.shared.wait(next, error.retry_after.is_none()).await;
        let is_refused = error.kind == ErrorKind::Unauthorized;
        if (error.kind.is_unreachable() || is_refused)
            && let Err(text) = self.client.reload(&self.used, is_refused).await
            && self.resource.consequence.is_none()
        {
            let error = WatchError::new(ErrorKind::Other, text);
            self.shared.failed(self.resource.index(), &error, Instant::now());
        }
    }

    /// An optional resource cannot be followed, which is no outage; returns the time of the next try.
    fn missing(&mut self, error: &WatchError, consequence: &str, next: Instant) -> Instant {
        if !matches!(error.kind, ErrorKind::NotFound | ErrorKind::Refused) {
            tracing::debug!(%error, "an optional resource is not followed");
            return next;
        }
        self.shared.missing(self.resource.index());
        if !mem::replace(&mut self.is_missing, true) {
            // An older server lacks what a newer one has; a missing role is a mistake.
            match error.kind {
                ErrorKind::NotFound => tracing::info!(%error, "{consequence}"),
                _ => tracing::warn!(%error, "{consequence}"),
            }
        }
        // A server that has just started may not know its roles yet.
        if self.shared.is_starting(self.resource.index()) { next } else { next + self.timing.missing_retry }
    }

    /// Lists if necessary, and watches until the watch ends.
    async fn session(&mut self, streams: bool) -> Result<(), WatchError> {
        if self.may_be_restored {
            let compared = self.compare_version().await;
            self.may_be_restored = self.state.version().is_some() && compared.is_err();
            compared?;
        }
        if self.state.version().is_none() && !streams {
            let span = debug_span!("list", resource = self.resource.plural);
            self.list().instrument(span).await?;
        }
        let version = self.state.version();
        let span = debug_span!("watch", resource = self.resource.plural, version);
        self.watch().instrument(span).await
    }

    /// Lists anew if the server's database is older than what was followed, as after its restore from a backup: a watch from a
    /// version that is not reached yet would send nothing, neither events nor bookmarks, until it is.
    ///
    /// The server asks its database, so that one that lags behind others of its cluster is not taken for one with older data.
    async fn compare_version(&mut self) -> Result<(), WatchError> {
        let Some(known) = self.state.version().and_then(number) else { return Ok(()) };
        let mut body = self.get(Verb::List, &self.query(&[("limit", "1")])).await?;
        let mut list = ListItems::default();
        while let Some(data) = next_data(&mut body, self.resource.plural, self.timing.timeout).await? {
            list.read(&data, |_| Ok(()))?;
        }
        let metadata = list.finish().map_err(|it| self.invalid(&it))?;
        if let Some(now) = metadata.resource_version.as_deref().and_then(number)
            && now < known
        {
            return Err(self.restored(now, known));
        }
        Ok(())
    }

    /// The server has older data than what was followed: list again, whatever its version.
    fn restored(&mut self, now: u64, known: u64) -> WatchError {
        self.state = State::ListNewest;
        let text = format!(
            "{}: the API server's data is older than what was followed, resource version {now} after {known}, as after a restore \
             from a backup",
            self.resource.plural
        );
        WatchError::new(ErrorKind::Expired, text)
    }

    /// Lists in pages.
    async fn list(&mut self) -> Result<(), WatchError> {
        self.store.begin_list();
        let mut continue_token = None;
        loop {
            let mut body = self.get(Verb::List, &self.list_query(continue_token.as_deref())).await?;
            let mut list = ListItems::default();
            while let Some(data) = next_data(&mut body, self.resource.plural, self.timing.timeout).await? {
                list.read(&data, |object| self.item(object))?;
            }
            let metadata = list.finish().map_err(|it| self.invalid(&it))?;
            continue_token = metadata.continue_.filter(|it| !it.is_empty());
            if continue_token.is_none() {
                self.listed(metadata.resource_version);
                return Ok(());
            }
        }
    }

    fn list_query(&self, continue_token: Option<&str>) -> String {
        let mut parameters = Vec::new();
        let oldest = match &self.state {
            State::ListAny => Some(ANY_VERSION),
            State::ListNotOlderThan(version) | State::Watch(version) => Some(&**version),
            State::ListNewest => None,
        };
        // Older servers ask their database for a page of a certain version.
        if oldest.is_none_or(|it| it == ANY_VERSION) {
            parameters.push(("limit", PAGE_SIZE));
        }
        match (continue_token, oldest) {
            (Some(token), _) => parameters.push(("continue", token)),
            (None, Some(version)) => {
                parameters.extend([("resourceVersion", version), ("resourceVersionMatch", NOT_OLDER)]);
            }
            (None, None) => {}
        }
        self.query(&parameters)
    }

    /// The query of a watch; without a version, of one that begins with a list.
    fn watch_query(&self, seconds: u64) -> String {
        let seconds = seconds.to_string();
        let mut parameters =
            vec![("watch", "true"), ("timeoutSeconds", &*seconds), ("allowWatchBookmarks", "true")];
        let version = self.state.version();
        if version.is_none() {
            parameters.extend([("sendInitialEvents", "true"), ("resourceVersionMatch", NOT_OLDER)]);
        }
        parameters.push(("resourceVersion", version.unwrap_or_default()));
        self.query(&parameters)
    }

    fn query(&self, parameters: &[(&str, &str)]) -> String {
        let Selectors { fields, labels } = &self.selectors;
        let selectors = [("fieldSelector", fields), ("labelSelector", labels)];
        let selectors = selectors.iter().filter_map(|(key, it)| Some((*key, it.as_deref()?)));
        let mut query = Serializer::new(String::new());
        query.extend_pairs(selectors.chain(parameters.iter().copied())).finish()
    }

    /// Watches from the known resource version; without one, the watch starts with a list.
    async fn watch(&mut self) -> Result<(), WatchError> {
        let (min, jitter) = if self.is_pinged { (WATCH, 0.2) } else { (self.timing.unpinged_watch, 0.5) };
        let seconds = min.mul_f64(1.0 + jitter * fastrand::f64()).as_secs();
        if self.state.version().is_none() {
            self.store.begin_list();
        }
        let body = self.get(Verb::Watch, &self.watch_query(seconds)).await?;
        if self.state.version().is_some() {
            self.shared.followed(self.resource.index());
        }
        let start = Instant::now();
        let mut lines = Lines::new(body);
        loop {
            let limit = match self.state.version() {
                None => self.timing.timeout,
                Some(_) => Duration::from_secs(seconds) + self.timing.watch_slack,
            };
            let left = limit.saturating_sub(start.elapsed());
            let more = lines.read(self.resource.plural, left, |line| self.event(line)).await;
            // Events before an error are valid.
            self.shared.publish(self.resource, &mut self.store);
            if self.state.version().is_none() && start.elapsed() >= limit {
                // A server that ignores the request for a list watches only, and may send events forever.
                return Err(self.no_list(format_args!("did not end within {limit:.0?}")));
            }
            if !more? {
                break;
            }
        }
        match self.state.version() {
            Some(_) => Ok(()),
            None => Err(self.no_list(format_args!("was not complete when the watch ended"))),
        }
    }

    fn no_list(&self, reason: fmt::Arguments<'_>) -> WatchError {
        let text = format!("{}: the streaming list {reason}", self.resource.plural);
        WatchError::new(ErrorKind::NoWatchList, text)
    }

    pub(super) fn event(&mut self, line: &[u8]) -> Result<(), WatchError> {
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let event: WatchEvent<'_> = serde_json::from_slice(line).map_err(|it| self.out_of_sync(&it))?;
        self.has_events = true;
        match event.event_type {
            EventType::Added | EventType::Modified => {
                let version = self.set(event.object)?;
                self.advance(version)?;
            }
            EventType::Deleted => {
                let PartialObject { metadata } = self.partial(event.object)?;
                self.store.delete(&self.resource.kind.name_of(&metadata));
                self.advance(metadata.resource_version)?;
            }
            EventType::Bookmark => {
                let PartialObject { metadata } = self.partial(event.object)?;
                let annotations = metadata.annotations.unwrap_or_default();
                if self.state.version().is_some() {
                    self.advance(metadata.resource_version)?;
                } else if annotations.initial_events_end.as_deref() == Some("true") {
                    self.listed(metadata.resource_version);
                }
            }
            EventType::Error => {
                let status: Status =
                    serde_json::from_str(event.object.get()).map_err(|it| self.out_of_sync(&it))?;
                return Err(WatchError::event(self.resource.plural, &status));
            }
        }
        Ok(())
    }

    /// Stores an object of a list.
    pub(super) fn item(&mut self, object: &[u8]) -> Result<(), WatchError> {
        let object = serde_json::from_slice(object).map_err(|it| self.invalid(&it))?;
        self.set(object).map(drop)
    }

    /// Stores an object and returns its resource version.
    fn set(&mut self, text: &RawValue) -> Result<Option<String>, WatchError> {
        match self.resource.kind.convert(text, &self.requested, false) {
            Ok((converted, metadata)) => {
                self.store.set(self.resource.kind.name_of(&metadata), converted);
                Ok(metadata.resource_version)
            }
            Err(reason) => {
                let PartialObject { metadata } = self.partial(text)?;
                let name = self.resource.kind.name_of(&metadata);
                let rejected = Rejected::not_served(
                    one_line(&name.to_string()),
                    format!("{}; the last valid version stays active", quoted(&reason)),
                );
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
        if let Some(version) = version.filter(|it| !it.is_empty()) {
            self.state = State::Watch(version);
        }
        self.backoff.reset();
        self.is_missing = false;
        self.shared.publish(self.resource, &mut self.store);
        self.shared.followed(self.resource.index());
        let objects = self.store.objects.len();
        tracing::debug!(resource = self.resource.plural, objects, "listed all objects");
    }

    /// Continues from the version of an event. While a list is read, its end has the version.
    fn advance(&mut self, version: Option<String>) -> Result<(), WatchError> {
        let Some(known) = self.state.version() else { return Ok(()) };
        let [known, now] = [Some(known), version.as_deref()].map(|it| it.and_then(number));
        if let (Some(known), Some(now)) = (known, now)
            && now < known
        {
            return Err(self.restored(now, known));
        }
        if let Some(version) = version.filter(|it| !it.is_empty()) {
            self.state = State::Watch(version);
            self.backoff.reset();
        }
        Ok(())
    }

    /// An event cannot be decoded, not even its name: list again.
    fn out_of_sync(&mut self, error: &serde_json::Error) -> WatchError {
        if let State::Watch(version) = &mut self.state {
            self.state = State::ListNotOlderThan(mem::take(version));
        }
        self.invalid(error)
    }

    fn invalid(&self, error: &serde_json::Error) -> WatchError {
        // It quotes values of any length.
        let error = quoted(&error.to_string());
        let text =
            format!("{}: the response of the API server cannot be decoded: {error}", self.resource.plural);
        WatchError::new(ErrorKind::Other, text)
    }

    async fn get(&mut self, verb: Verb, query: &str) -> Result<Body, WatchError> {
        self.used = self.client.get();
        let uri = format!("{}?{query}", self.resource.path);
        let form = match (self.resource.is_metadata, verb) {
            (false, _) => JSON,
            (true, Verb::List) => METADATA_LIST,
            (true, Verb::Watch) => METADATA,
        };
        let encoding = match verb {
            Verb::List => GZIP,
            Verb::Watch => IDENTITY,
        };
        let response = self.used.get(self.resource.plural, &uri, form, encoding, self.timing.timeout).await?;
        let (parts, mut body) = response.into_parts();
        self.is_pinged = parts.version == Version::HTTP_2;
        if parts.status.is_success() {
            self.shared.contact(self.resource.index());
            return Ok(body);
        }
        let body = read_all(&mut body, self.resource.plural, self.timing.timeout, MAX_ERROR_BODY).await;
        let is_starting = self.shared.is_starting(self.resource.index());
        Err(WatchError::status(
            self.resource.plural,
            parts.status,
            &parts.headers,
            &body.unwrap_or_default(),
            is_starting,
        ))
    }
}

/// A resource version as a number, as which versions of one resource can be compared (KEP-5504).
fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}
