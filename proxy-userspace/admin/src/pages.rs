//! Which page is where.
//!
//! The one rule: reading only. Whatever is asked, nothing changes.

use std::fmt;

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Bytes,
    header::{ALLOW, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};
use publish::print::{Format, render};

use crate::{
    Admin,
    health::{self, Health},
    record::Moment,
};

/// Pages that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// For kubelet and load balancers.
    Health,
    /// For Prometheus and people.
    Metrics,
}

impl Site {
    /// The paths of its pages.
    pub fn paths(self) -> &'static [&'static str] {
        match self {
            Self::Health => &["/healthz", "/livez", "/readyz"],
            Self::Metrics => &["/metrics", "/proxyMode", "/state", "/status", "/healthz"],
        }
    }
}

impl fmt::Display for Site {
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

type Page = (StatusCode, &'static str, String);

impl Admin {
    /// The answer to a request.
    pub(crate) async fn answer<B>(&self, site: Site, request: &Request<B>) -> Response<Full<Bytes>> {
        let path = request.uri().path();
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        let (status, kind, body) = if is_read {
            self.page(site, path).await
        } else {
            (StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n".into())
        };
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if !is_read {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        response
    }

    async fn page(&self, site: Site, path: &str) -> Page {
        match (site, path) {
            (Site::Health, "/healthz") => {
                let health = Health::eligible(&self.record(), Moment::now());
                self.metrics.asked_healthz(health.is_ok());
                health_page(&health)
            }
            (Site::Health, "/livez") => {
                let health = Health::live(&self.record(), Moment::now());
                self.metrics.asked_livez(health.is_ok());
                health_page(&health)
            }
            (Site::Health, "/readyz") => {
                let (ready, text) = health::readyz(&self.record(), Moment::now());
                (code(ready), TEXT, text)
            }
            (Site::Metrics, "/metrics") => {
                self.aside(|it| match it.metrics.text() {
                    Ok(text) => (StatusCode::OK, PROMETHEUS, text),
                    Err(error) => failed(&error),
                })
                .await
            }
            // kube-proxy's word for how services are programmed; it is asked for by upstream's tests.
            (Site::Metrics, "/proxyMode") => (StatusCode::OK, TEXT, self.record().mode().into()),
            // As on kube-proxy's metrics port: that the process answers.
            (Site::Metrics, "/healthz") => (StatusCode::OK, TEXT, "ok".into()),
            (Site::Metrics, "/status") => self.aside(|it| json(&it.status())).await,
            (Site::Metrics, "/state") => self.state().await,
            (site, _) => {
                let text = format!("there is no such page; there are {}\n", site.paths().join(", "));
                (StatusCode::NOT_FOUND, TEXT, text)
            }
        }
    }

    /// The state in force, or the newest where nothing is brought into force.
    async fn state(&self) -> Page {
        let Some(published) = self.record().served() else {
            return (StatusCode::SERVICE_UNAVAILABLE, TEXT, "there is no state yet\n".into());
        };
        self.aside(move |_| match render(&published, Format::Json) {
            Ok(text) => (StatusCode::OK, JSON, text),
            Err(error) => failed(&error),
        })
        .await
    }

    /// Makes a page that takes a while; others are answered meanwhile.
    async fn aside(&self, page: impl FnOnce(&Self) -> Page + Send + 'static) -> Page {
        let it = self.clone();
        tokio::task::spawn_blocking(move || page(&it)).await.unwrap_or_else(|error| failed(&error))
    }
}

fn code(ok: bool) -> StatusCode {
    if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

fn health_page(health: &Health) -> Page {
    let (_, kind, body) = json(health);
    (code(health.is_ok()), kind, body)
}

fn json(value: &impl serde::Serialize) -> Page {
    match serde_json::to_string(value) {
        Ok(text) => (StatusCode::OK, JSON, text),
        Err(error) => failed(&error),
    }
}

fn failed(error: &dyn fmt::Display) -> Page {
    (StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n"))
}
