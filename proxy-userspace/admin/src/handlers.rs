//! The HTTP handlers of all pages.
//!
//! Invariant: requests are read-only.

use std::{borrow::Cow, fmt};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Bytes,
    header::{ALLOW, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};
use model::escaped;
use publish::print::{Format, render};

use crate::{
    admin::Admin,
    health::{self, Health},
    state::Moment,
};

/// Pages that share an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageGroup {
    /// For kubelet and load balancers.
    Health,
    /// For Prometheus and people.
    Metrics,
}

impl PageGroup {
    /// The flag that sets their address.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Health => "--healthz-bind-address",
            Self::Metrics => "--metrics-bind-address",
        }
    }

    /// The paths of its pages.
    pub fn paths(self) -> &'static [&'static str] {
        match self {
            Self::Health => &["/healthz", "/livez", "/readyz"],
            Self::Metrics => &["/metrics", "/proxyMode", "/state", "/status", "/healthz"],
        }
    }
}

impl fmt::Display for PageGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Health => "health",
            Self::Metrics => "metrics",
        })
    }
}

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Status, content type and body.
type Page = (StatusCode, &'static str, String);

impl Admin {
    /// The response to a request.
    pub(crate) async fn respond<B>(&self, pages: PageGroup, request: &Request<B>) -> Response<Full<Bytes>> {
        let path = request.uri().path();
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        let (status, content_type, body) = if is_read {
            self.page(pages, path).await
        } else {
            (StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD are allowed\n".into())
        };
        // JSON stays the same document.
        let body = match escaped(&body) {
            Cow::Borrowed(_) => body,
            Cow::Owned(it) => it,
        };
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if !is_read {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        response
    }

    async fn page(&self, pages: PageGroup, path: &str) -> Page {
        match (pages, path) {
            (PageGroup::Health, "/healthz") => {
                let health = Health::eligible(&self.state(), Moment::now());
                self.metrics.on_healthz(health.is_ok());
                health_page(&health)
            }
            (PageGroup::Health, "/livez") => {
                let health = Health::live(&self.state(), Moment::now());
                self.metrics.on_livez(health.is_ok());
                health_page(&health)
            }
            (PageGroup::Health, "/readyz") => {
                let (ready, text) = health::readyz(&self.state(), Moment::now());
                (health_code(ready), TEXT, text)
            }
            (PageGroup::Metrics, "/metrics") => {
                self.spawn_blocking(|it| match it.metrics.text() {
                    Ok(text) => (StatusCode::OK, PROMETHEUS, text),
                    Err(error) => internal_error(&error),
                })
                .await
            }
            // kube-proxy's name of its mode; upstream's tests query it.
            (PageGroup::Metrics, "/proxyMode") => (StatusCode::OK, TEXT, self.state().proxy_mode().into()),
            // As on kube-proxy's metrics port: the process responds.
            (PageGroup::Metrics, "/healthz") => (StatusCode::OK, TEXT, "ok".into()),
            (PageGroup::Metrics, "/status") => self.spawn_blocking(|it| json(&it.status())).await,
            (PageGroup::Metrics, "/state") => self.state_page().await,
            (pages, _) => {
                let text = format!("no such page; available: {}\n", pages.paths().join(", "));
                (StatusCode::NOT_FOUND, TEXT, text)
            }
        }
    }

    /// The served state.
    async fn state_page(&self) -> Page {
        let Some(published) = self.state().served() else {
            return (StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{}\n", health::NO_STATE));
        };
        self.spawn_blocking(move |_| match render(&published, Format::Json) {
            Ok(text) => (StatusCode::OK, JSON, text),
            Err(error) => internal_error(&error),
        })
        .await
    }

    /// Renders a slow page without blocking other requests.
    async fn spawn_blocking(&self, page: impl FnOnce(&Self) -> Page + Send + 'static) -> Page {
        let it = self.clone();
        tokio::task::spawn_blocking(move || page(&it)).await.unwrap_or_else(|error| internal_error(&error))
    }
}

fn health_code(ok: bool) -> StatusCode {
    if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

fn health_page(health: &Health) -> Page {
    let (_, content_type, body) = json(health);
    (health_code(health.is_ok()), content_type, body)
}

fn json(value: &impl serde::Serialize) -> Page {
    match serde_json::to_string(value) {
        Ok(text) => (StatusCode::OK, JSON, text),
        Err(error) => internal_error(&error),
    }
}

fn internal_error(error: &dyn fmt::Display) -> Page {
    (StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n"))
}
