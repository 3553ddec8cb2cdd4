//! HTTP: lists, watches and posted events.
//!
//! Responses follow Kubernetes' API concepts, unless a fault applies.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt::Write as _,
    io::Write as _,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::Result;
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Collected, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::mpsc,
    time::{Instant, sleep, sleep_until},
};
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    objects::{Object, Resource},
    selector::Selector,
    state::{Answers, Fault, Settings, Shared, State, Verb, WatchList},
    tls::Identity,
};

type Body = BoxBody<Bytes, std::io::Error>;
/// Shorter lists are not compressed (`defaultGzipThresholdBytes` of k8s.io/apiserver).
const MIN_COMPRESSED: usize = 128 << 10;

type Sender = mpsc::Sender<Result<Frame<Bytes>, std::io::Error>>;

/// Serves until it is dropped.
pub(crate) async fn serve(
    listener: std::net::TcpListener,
    identity: Option<Arc<Identity>>,
    shared: Arc<Shared>,
) -> Result<()> {
    let listener = TcpListener::from_std(listener)?;
    loop {
        let (stream, _) = listener.accept().await?;
        // As Go's servers do: an event must not wait until the one before is acknowledged.
        stream.set_nodelay(true)?;
        let (shared, identity) = (Arc::clone(&shared), identity.clone());
        tokio::spawn(async move {
            // Clients may close their connections at any time.
            match identity {
                None => connection(stream, shared).await,
                Some(identity) => {
                    if let Ok(stream) = identity.acceptor.accept(stream).await {
                        connection(stream, shared).await;
                    }
                }
            }
        });
    }
}

pub(crate) async fn connection<S>(stream: S, shared: Arc<Shared>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut disconnects = shared.disconnects.subscribe();
    disconnects.mark_unchanged();
    let service = service_fn(move |request| {
        let shared = Arc::clone(&shared);
        async move { Ok::<_, Infallible>(answer(request, shared).await) }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    tokio::select! {
        _ = server.serve_connection(TokioIo::new(stream), service) => {}
        _ = disconnects.changed() => {}
    }
}

async fn answer(request: Request<Incoming>, shared: Arc<Shared>) -> Response<Body> {
    let uri = request.uri();
    let answers = shared.state.lock().settings.answers;
    match answers {
        Answers::All => {}
        Answers::Unavailable => {
            return status(StatusCode::SERVICE_UNAVAILABLE, "no server is available", None);
        }
        Answers::None => std::future::pending().await,
    }
    if uri.path() == "/version" {
        shared.state.lock().requests.push(text_of(uri));
        return Response::new(full(json!({"major": "1", "minor": "36"}).to_string()));
    }
    if request.method() == Method::POST {
        return create(request, &shared).await;
    }
    let query: HashMap<_, _> =
        form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned().collect();
    if let Some(name) = uri.path().strip_prefix("/api/v1/nodes/") {
        return node(&request, &shared.state.lock(), name);
    }
    let Some(resource) = Resource::of_path(uri.path()) else {
        return status(StatusCode::NOT_FOUND, "the server could not find the requested resource", None);
    };
    let verb = match query.get("limit") {
        _ if query.contains_key("watch") => Verb::Watch,
        Some(limit) if limit == "1" => Verb::Version,
        _ => Verb::List,
    };
    let (fault, settings) = {
        let mut state = shared.state.lock();
        state.requests.push(text_of(uri));
        (state.take_fault(resource, verb), state.settings.clone())
    };
    if !is_authorized(&request, &settings) {
        return status(StatusCode::UNAUTHORIZED, "Unauthorized", None);
    }
    let accept = request.headers().get(header::ACCEPT).and_then(|it| it.to_str().ok()).unwrap_or_default();
    if resource == Resource::Pods && !accept.contains(";as=PartialObjectMetadata") {
        return status(StatusCode::NOT_ACCEPTABLE, "only the metadata of pods is served here", None);
    }
    match fault {
        Some(Fault::Status { code, message, retry_after }) => {
            let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            return status(code, &message, retry_after);
        }
        Some(Fault::ErrorEvent { code, message }) => {
            let object = failure(code, &message);
            let line = json!({"type": "ERROR", "object": object}).to_string() + "\n";
            return Response::new(full(line));
        }
        Some(Fault::NoResponse) => std::future::pending().await,
        _ => {}
    }
    let text = |key: &str| query.get(key).map(String::as_str).unwrap_or_default();
    let selector =
        match Selector::parse(text("labelSelector"), text("fieldSelector"), settings.has_field_selectors) {
            Ok(selector) => selector,
            Err(message) => return status(StatusCode::BAD_REQUEST, &message, None),
        };
    if verb != Verb::Watch {
        return list(&shared.state.lock(), resource, &selector, &query).map_or_else(
            |message| status(StatusCode::GONE, &message, None),
            |text| {
                let is_accepted =
                    request.headers().get(header::ACCEPT_ENCODING).is_some_and(|it| it.as_bytes() == b"gzip");
                let is_compressed = is_accepted && text.len() > MIN_COMPRESSED;
                let bytes = if is_compressed { gzip(text.as_bytes()) } else { text.into_bytes() };
                let (mut out, mut response) = respond(&shared, fault);
                tokio::spawn(async move { out.send(bytes).await });
                if is_compressed {
                    let encoding = header::HeaderValue::from_static("gzip");
                    response.headers_mut().insert(header::CONTENT_ENCODING, encoding);
                }
                response
            },
        );
    }
    let lists = text("sendInitialEvents") == "true";
    if lists && settings.watch_list == WatchList::Rejected {
        let message = "ListOptions.meta.k8s.io \"\" is invalid: sendInitialEvents: Forbidden: sendInitialEvents is \
                       forbidden for watch unless the WatchList feature gate is enabled";
        return status(StatusCode::UNPROCESSABLE_ENTITY, message, None);
    }
    // Without a version, or from version 0, a watch begins with all objects.
    let from = text("resourceVersion").parse().ok().filter(|it| !lists && *it != 0);
    if let Some(from) = from
        && shared.state.lock().objects.since(from).is_none()
    {
        return status(StatusCode::GONE, &format!("too old resource version: {from}"), None);
    }
    let timeout = Duration::from_secs(text("timeoutSeconds").parse().unwrap_or(300));
    let marks_end = lists && settings.watch_list == WatchList::Supported;
    let watch = Watch {
        shared: Arc::clone(&shared),
        resource,
        selector,
        from,
        marks_end,
        deadline: Instant::now() + timeout,
    };
    let (out, response) = respond(&shared, fault);
    tokio::spawn(watch.run(out, settings.bookmark_interval));
    response
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text).and_then(|()| encoder.finish()).expect("a Vec takes everything")
}

/// Without the server's name, which HTTP/2 adds.
fn text_of(uri: &Uri) -> String {
    uri.path_and_query().map(ToString::to_string).unwrap_or_default()
}

/// Accepts an event; no other object can be created.
async fn create(request: Request<Incoming>, shared: &Shared) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let namespace = path
        .strip_prefix("/apis/events.k8s.io/v1/namespaces/")
        .and_then(|it| it.strip_suffix("/events"))
        .filter(|it| !it.is_empty() && !it.contains('/'));
    let Some(namespace) = namespace else {
        return status(StatusCode::METHOD_NOT_ALLOWED, "the server does not allow this method", None);
    };
    let settings = shared.state.lock().settings.clone();
    if !is_authorized(&request, &settings) {
        return status(StatusCode::UNAUTHORIZED, "Unauthorized", None);
    }
    let body = request.into_body().collect().await.map(Collected::to_bytes).unwrap_or_default();
    let event = serde_json::from_slice::<Value>(&body).unwrap_or_default();
    if !settings.accepts_events {
        let message = "events.events.k8s.io is forbidden: User \"u\" cannot create resource \"events\"";
        return status(StatusCode::FORBIDDEN, message, None);
    }
    let is_set = |key: &str| event[key].as_str().is_some_and(|it| !it.is_empty());
    // The required fields of an event.
    let is_valid = event["metadata"]["namespace"] == namespace
        && event["metadata"]["name"].is_string()
        && ["eventTime", "reportingController", "reportingInstance", "reason", "action", "type"]
            .into_iter()
            .all(is_set);
    if !is_valid {
        return status(StatusCode::UNPROCESSABLE_ENTITY, &format!("Event is invalid: {event}"), None);
    }
    let mut state = shared.state.lock();
    let name = |it: &Value| [&it["metadata"]["namespace"], &it["metadata"]["name"]].map(Value::clone);
    if state.events.iter().any(|it| name(it) == name(&event)) {
        let message = format!("events.events.k8s.io {} already exists", event["metadata"]["name"]);
        return status(StatusCode::CONFLICT, &message, None);
    }
    state.events.push(event);
    drop(state);
    let mut response = Response::new(full(String::from_utf8_lossy(&body).into_owned()));
    *response.status_mut() = StatusCode::CREATED;
    response
}

fn is_authorized(request: &Request<Incoming>, settings: &Settings) -> bool {
    let shown = request.headers().get(header::AUTHORIZATION).and_then(|it| it.to_str().ok());
    settings.token.as_ref().is_none_or(|token| shown == Some(&format!("Bearer {token}")))
}

/// A Node by its name, as kube-proxy before 1.35 asks for its own.
fn node(request: &Request<Incoming>, state: &State, name: &str) -> Response<Body> {
    if !is_authorized(request, &state.settings) {
        return status(StatusCode::UNAUTHORIZED, "Unauthorized", None);
    }
    let found = state.objects.after(Resource::Nodes, "").find(|(key, _)| *key == name);
    found.map_or_else(
        || status(StatusCode::NOT_FOUND, &format!("nodes {name:?} not found"), None),
        |(_, object)| Response::new(full(object.json.clone())),
    )
}

/// A page of a list; an expired continue token is an error.
fn list(
    state: &State,
    resource: Resource,
    selector: &Selector,
    query: &HashMap<String, String>,
) -> Result<String, String> {
    let not_older = query.get("resourceVersion").and_then(|it| it.parse::<u64>().ok());
    let is_cached = state.settings.has_cache && not_older == Some(0);
    let limit =
        query.get("limit").filter(|_| !is_cached).and_then(|it| it.parse().ok()).unwrap_or(usize::MAX);
    // `version|key`
    let (version, key) = match query.get("continue").and_then(|it| it.split_once('|')) {
        Some((version, key)) => (version.parse().unwrap_or(0), key),
        None => {
            let newest = state.objects.version;
            let lag = if not_older.is_some() { state.settings.list_lag } else { 0 };
            let oldest = state.objects.compacted.max(not_older.unwrap_or(0)).max(1);
            (newest.saturating_sub(lag).max(oldest), "")
        }
    };
    if state.objects.since(version).is_none() {
        return Err("The provided continue parameter is too old to display a consistent list result.".into());
    }
    let objects = state.objects.at(resource, version);
    let mut after = objects.iter().filter(|(it, object)| it.as_str() > key && selector.matches(object));
    let page: Vec<_> = after.by_ref().take(limit).collect();
    let more = after.next().is_some();
    let next = page.last().filter(|_| more).map(|(key, _)| format!("{version}|{key}")).unwrap_or_default();
    let [kind, group, _] = resource.names();
    let metadata = json!({"resourceVersion": version.to_string(), "continue": next});
    let items: Vec<_> = page.iter().map(|(_, it)| it.served(resource)).collect();
    let items = items.join(",");
    Ok(format!(
        "{{\"kind\":\"{kind}List\",\"apiVersion\":\"{group}\",\"metadata\":{metadata},\"items\":[{items}]}}"
    ))
}

struct Watch {
    shared: Arc<Shared>,
    resource: Resource,
    selector: Selector,
    /// `None` if the watch begins with all objects.
    from: Option<u64>,
    /// Whether their end is marked.
    marks_end: bool,
    deadline: Instant,
}

impl Watch {
    async fn run(self, mut out: Out, every: Duration) -> Result<(), ()> {
        let mut changed = self.shared.version.subscribe();
        let mut seen = match self.from {
            Some(from) => from,
            None => self.send_list(&mut out).await?,
        };
        let mut bookmark = Instant::now() + every;
        loop {
            changed.mark_unchanged();
            let (text, now) = self.changes(seen);
            // From a version that is not reached yet on, there is nothing to say before it is.
            let is_reached = now.is_some_and(|it| it >= seen);
            seen = seen.max(now.unwrap_or(0));
            out.send(text).await?;
            if now.is_none() {
                return Ok(());
            }
            tokio::select! {
                // Changes first: a bookmark's version must have been reported.
                biased;
                _ = changed.changed() => {}
                () = sleep_until(self.deadline) => return Ok(()),
                () = sleep_until(bookmark) => {
                    bookmark = Instant::now() + every;
                    if !is_reached {
                        continue;
                    }
                    out.send(self.bookmark(seen, &json!({}))).await?;
                }
            }
        }
    }

    /// Sends all objects and the bookmark at their end.
    async fn send_list(&self, out: &mut Out) -> Result<u64, ()> {
        let mut text = String::new();
        let version = {
            let state = self.shared.state.lock();
            for (_, object) in
                state.objects.after(self.resource, "").filter(|(_, it)| self.selector.matches(it))
            {
                self.line(&mut text, "ADDED", object);
            }
            state.objects.version
        };
        if self.marks_end {
            text += &self.bookmark(version, &json!({"k8s.io/initial-events-end": "true"}));
        }
        out.send(text).await?;
        Ok(version)
    }

    /// The changes after a version, and the current version; an error event and `None` if the history was dropped.
    fn changes(&self, seen: u64) -> (String, Option<u64>) {
        let state = self.shared.state.lock();
        let mut text = String::new();
        let Some(changes) = state.objects.since(seen) else {
            let object = failure(410, &format!("too old resource version: {seen}"));
            return (json!({"type": "ERROR", "object": object}).to_string() + "\n", None);
        };
        for change in changes.filter(|it| it.resource == self.resource) {
            let before = change.before.as_ref().filter(|it| self.selector.matches(it));
            let is_selected = !change.is_deleted && self.selector.matches(&change.now);
            match (before, is_selected) {
                (None, true) => self.line(&mut text, "ADDED", &change.now),
                (Some(_), true) => self.line(&mut text, "MODIFIED", &change.now),
                (Some(_), false) => self.line(&mut text, "DELETED", &change.now),
                (None, false) => {}
            }
        }
        (text, Some(state.objects.version))
    }

    fn line(&self, text: &mut String, what: &str, object: &Object) {
        let object = object.served(self.resource);
        writeln!(text, "{{\"type\":\"{what}\",\"object\":{object}}}").expect("a String accepts all text");
    }

    fn bookmark(&self, version: u64, annotations: &Value) -> String {
        let metadata = json!({"resourceVersion": version.to_string(), "annotations": annotations});
        let [kind, group, _] = self.resource.names();
        let object = json!({"kind": kind, "apiVersion": group, "metadata": metadata});
        json!({"type": "BOOKMARK", "object": object}).to_string() + "\n"
    }
}

fn respond(shared: &Arc<Shared>, fault: Option<Fault>) -> (Out, Response<Body>) {
    let (sender, receiver) = mpsc::channel(4);
    let out = Out { shared: Arc::clone(shared), fault, sender, sent: 0 };
    let mut response = Response::new(StreamBody::new(ReceiverStream::new(receiver)).boxed());
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    (out, response)
}

/// The writer of a body.
struct Out {
    shared: Arc<Shared>,
    /// What happens to the body, if it is a fault of bodies.
    fault: Option<Fault>,
    sender: Sender,
    sent: usize,
}

impl Out {
    /// Fails if the client has closed the connection, or a fault closes it.
    async fn send(&mut self, data: impl Into<Bytes>) -> Result<(), ()> {
        let mut rest = data.into();
        let (fragment_size, end) = match self.fault {
            Some(Fault::Fragments(bytes)) => (bytes, usize::MAX),
            Some(Fault::DisconnectAfter(bytes)) => (usize::MAX, bytes),
            _ => (usize::MAX, usize::MAX),
        };
        while !rest.is_empty() {
            let fragment = rest.split_to(rest.len().min(fragment_size).min(end - self.sent));
            self.sent += fragment.len();
            self.shared.sent.fetch_add(fragment.len() as u64, Ordering::Relaxed);
            if !fragment.is_empty() {
                self.sender.send(Ok(Frame::data(fragment))).await.map_err(drop)?;
            }
            if self.sent == end {
                // What was sent should arrive before the connection is closed.
                sleep(Duration::from_millis(20)).await;
                let _ = self.sender.send(Err(std::io::Error::other("disconnected"))).await;
                return Err(());
            }
            if fragment_size < usize::MAX {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }
}

fn full(text: String) -> Body {
    Full::new(Bytes::from(text)).map_err(|it| match it {}).boxed()
}

fn failure(code: u16, message: &str) -> Value {
    let reason = if code == 410 { "Expired" } else { "InternalError" };
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "code": code,
    })
}

fn status(code: StatusCode, message: &str, retry_after: Option<u64>) -> Response<Body> {
    let mut response = Response::new(full(failure(code.as_u16(), message).to_string()));
    *response.status_mut() = code;
    if let Some(seconds) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
