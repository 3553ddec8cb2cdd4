//! The pages: what each responds with, and which pages share an address.
//!
//! Invariant: requests are read-only. A page knows the state, its health and metrics, and of HTTP only requests and bodies.

pub(crate) mod explain;
mod status;
pub(crate) mod trace;
mod z_pages;

use std::{fmt, sync::Arc};

use hyper::{
    Method, Request, Response, StatusCode,
    header::{ALLOW, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};
use jiff::Timestamp;
use model::escaped;
use publish::json_parts;
use tokio::task::spawn_blocking;

use crate::{
    admin::Admin,
    health::{self, Health},
    http::{
        PageGroup,
        body::{self, Expiry, PageBody, Parts},
    },
    metrics::code,
    state::Moment,
    ui,
};

pub(crate) use self::trace::RunningTrace;
pub use self::{
    status::{CountersStatus, EjectedStatus, RejectedStatus, Revision, SourceStatus, Status, TableStatus},
    trace::TraceStatus,
};

const JSON: &str = "application/json";
const JSON_LINES: &str = "application/jsonl";
const HTML: &str = "text/html; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

type Page = (StatusCode, &'static str, PageBody);

impl Admin {
    pub(crate) async fn respond<B>(&self, pages: PageGroup, request: &Request<B>) -> Response<PageBody> {
        let uri = request.uri();
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        let (status, content_type, body) = match pages {
            _ if !is_read => text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are allowed\n"),
            PageGroup::Ui => self.ui_page(request).await,
            _ => {
                let expiry = request.extensions().get::<Expiry>();
                self.page(pages, uri.path(), uri.query().unwrap_or_default(), expiry).await
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if !is_read {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        if pages == PageGroup::Ui {
            ui::protect(&mut response);
        }
        response
    }

    async fn page(&self, pages: PageGroup, path: &str, query: &str, expiry: Option<&Expiry>) -> Page {
        match (pages, path) {
            (PageGroup::Probes | PageGroup::Health, "/healthz") => {
                let health = Health::eligible(&self.state(), Moment::now());
                self.metrics.healthz.get_or_create(&code(health.is_ok())).inc();
                health_page(&health)
            }
            (PageGroup::Probes | PageGroup::Health, "/livez") => {
                let health = Health::live(&self.state(), Moment::now());
                self.metrics.livez.get_or_create(&code(health.is_ok())).inc();
                health_page(&health)
            }
            (PageGroup::Probes | PageGroup::Health, "/readyz") => {
                let checks = health::readiness(&self.state(), Moment::now());
                for (name, result) in &checks {
                    self.metrics.slis.observe("readyz", name, result.is_ok());
                }
                let (ready, checks) = health::readyz(&checks);
                text(health_code(ready), checks)
            }
            (PageGroup::Metrics | PageGroup::Status, "/metrics") => {
                let it = self.clone();
                counted(PROMETHEUS, move || it.metrics.parts().map_err(|it| it.to_string())).await
            }
            // kube-proxy's name of its mode; upstream's tests query it.
            (PageGroup::Metrics, "/proxyMode") => text(StatusCode::OK, self.state().proxy_mode()),
            // As on kube-proxy's metrics port: the process responds.
            (PageGroup::Metrics, "/healthz") => {
                self.metrics.slis.observe("healthz", "ping", true);
                text(StatusCode::OK, "ok")
            }
            (PageGroup::Metrics, "/metrics/slis") => match self.metrics.slis.text() {
                Ok(body) => (StatusCode::OK, PROMETHEUS, short(body)),
                Err(error) => internal_error(&error),
            },
            (PageGroup::Metrics, "/configz") => {
                (StatusCode::OK, JSON, short(self.state().readers.configuration.configz()))
            }
            (PageGroup::Metrics, "/flagz") => {
                text(StatusCode::OK, self.state().readers.configuration.flagz())
            }
            (PageGroup::Metrics, "/statusz") => {
                let started = health::timestamp(self.state().started.wall);
                text(StatusCode::OK, z_pages::statusz(started, Timestamp::now(), pages.paths()))
            }
            (PageGroup::Status, "/status") => {
                let it = self.clone();
                counted(JSON, move || it.status_parts()).await
            }
            (PageGroup::Status, "/state") => self.state_page(),
            (PageGroup::Status, "/explain") => self.explain_page(query).await,
            (PageGroup::Status, "/trace") => self.trace_page(query, expiry).await,
            (PageGroup::Status, "/config") => {
                text(StatusCode::OK, self.state().readers.configuration.table.as_str())
            }
            (PageGroup::Status, "/log") => {
                let log = self.state().readers.log.as_ref().map(|it| it());
                text(StatusCode::OK, log.unwrap_or_default())
            }
            (pages, _) => {
                let available = pages.paths().join(", ");
                text(StatusCode::NOT_FOUND, format!("no such page; available: {available}\n"))
            }
        }
    }

    /// The page for people, and what it asks for.
    async fn ui_page<B>(&self, request: &Request<B>) -> Page {
        if let Some(refusal) = ui::refusal(request) {
            return text(StatusCode::FORBIDDEN, refusal);
        }
        let query = request.uri().query().unwrap_or_default();
        match request.uri().path() {
            "/" => (StatusCode::OK, HTML, body::short(ui::PAGE)),
            "/live" => match self.ui.live(Arc::clone(&self.state), query).await {
                Ok(answer) => (StatusCode::OK, JSON, short(answer)),
                Err(error) => internal_error(&error),
            },
            "/explain" => explained(self.ui.explain(&self.state, query).await),
            _ => text(StatusCode::NOT_FOUND, "no such page; available: /\n"),
        }
    }

    fn state_page(&self) -> Page {
        let Some(published) = self.state().served() else {
            return text(StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", health::NO_STATE));
        };
        large(JSON, Box::new(json_parts(&published).map(|it| it.map_err(|it| it.to_string()))))
    }

    async fn explain_page(&self, query: &str) -> Page {
        let explainer = self.state().readers.explainer.clone();
        explained(explain::answer(explainer, query).await)
    }

    async fn trace_page(&self, query: &str, expiry: Option<&Expiry>) -> Page {
        let tracer = self.state().readers.tracer.clone();
        let Some(tracer) = tracer else {
            return text(
                StatusCode::NOT_IMPLEMENTED,
                "this process has no programs: ask `run` or `agent`, with an eBPF backend\n",
            );
        };
        if let Some(expiry) = expiry {
            expiry.wait_for_start();
        }
        match tracer(trace::filters(query)).await {
            Ok(lines) => (StatusCode::OK, JSON_LINES, body::trace(lines, expiry.cloned())),
            Err(error) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
        }
    }
}

/// A page whose first parts need the kernel's counters, which are read without blocking other requests.
async fn counted(
    content_type: &'static str,
    parts: impl FnOnce() -> Result<Parts, String> + Send + 'static,
) -> Page {
    match spawn_blocking(parts).await {
        Ok(Ok(parts)) => large(content_type, parts),
        Ok(Err(error)) => internal_error(&error),
        Err(error) => internal_error(&error),
    }
}

fn large(content_type: &'static str, parts: Parts) -> Page {
    (StatusCode::OK, content_type, body::large(parts))
}

fn explained(answer: Result<String, (StatusCode, String)>) -> Page {
    match answer {
        Ok(answer) => (StatusCode::OK, JSON, short(answer)),
        Err((status, error)) => text(status, format!("{error}\n")),
    }
}

fn health_code(ok: bool) -> StatusCode {
    if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

fn health_page(health: &Health) -> Page {
    match serde_json::to_string(health) {
        Ok(body) => (health_code(health.is_ok()), JSON, short(body)),
        Err(error) => internal_error(&error),
    }
}

fn text(status: StatusCode, text: impl Into<String>) -> Page {
    (status, TEXT, short(text.into()))
}

/// A text as a terminal may show it; JSON stays the same document.
fn short(text: String) -> PageBody {
    body::short(escaped(&text).into_owned())
}

fn internal_error(error: &dyn fmt::Display) -> Page {
    text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n"))
}
