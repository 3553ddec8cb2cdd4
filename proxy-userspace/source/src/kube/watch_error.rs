//! Errors of requests to the API server.
//!
//! A message is one line that names the resource, the response and the remedy.

use std::time::Duration;

use http::{HeaderMap, StatusCode, header::RETRY_AFTER};
use hyper_util::client::legacy::Error as HttpError;
use kube::core::Status;
use model::error_chain;

use super::resource::PODS;
use crate::text::{one_line, shortened};

/// How much of a response is quoted, in characters.
const MAX_QUOTE: usize = 300;

/// Why a list or a watch has ended early.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct WatchError {
    pub(super) kind: ErrorKind,
    /// The message for users, which begins with the resource.
    pub(super) text: String,
    /// How long to wait at least, as the server requests.
    pub(super) retry_after: Option<Duration>,
}

/// What an error requires besides a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorKind {
    /// The server does not have the resource version any more, or not yet: list again.
    Expired,
    /// The server does not support watch-list: list in pages.
    NoWatchList,
    /// The server does not know a parameter: of a streaming list, or the field selector.
    BadRequest,
    /// There is no connection: read the configuration again.
    NoConnection,
    /// There is a connection, but no response, or not all of it: read the configuration again.
    NoResponse,
    /// The credentials are not accepted: read them again.
    Unauthorized,
    NotFound,
    /// The server refuses this client's requests, whatever they ask for.
    Refused,
    /// The server has too many requests now.
    Overloaded,
    Other,
}

impl ErrorKind {
    pub(super) fn is_unreachable(self) -> bool {
        matches!(self, Self::NoConnection | Self::NoResponse)
    }

    /// Whether a streaming list may have failed because of what it asks for.
    pub(super) fn concerns_request(self) -> bool {
        matches!(self, Self::NoWatchList | Self::BadRequest | Self::NoResponse | Self::Other)
    }
}

impl WatchError {
    pub(super) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), retry_after: None }
    }

    /// A response other than 200; of a server that is starting if `is_starting`.
    pub(super) fn status(
        resource: &str,
        code: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
        is_starting: bool,
    ) -> Self {
        let status = serde_json::from_slice::<Status>(body).ok();
        let message = match &status {
            Some(status) if !status.message.is_empty() => quoted(&status.message),
            _ => quoted(&String::from_utf8_lossy(body)),
        };
        let reason = code.canonical_reason().unwrap_or("");
        let (kind, remedy) = match code {
            StatusCode::GONE => (ErrorKind::Expired, ""),
            // The message is part of the API: clients of all versions look for it.
            StatusCode::GATEWAY_TIMEOUT if message.contains("Too large resource version") => {
                (ErrorKind::Expired, "")
            }
            StatusCode::NOT_FOUND => (ErrorKind::NotFound, ""),
            StatusCode::UNPROCESSABLE_ENTITY => (ErrorKind::NoWatchList, ""),
            StatusCode::BAD_REQUEST => (ErrorKind::BadRequest, ""),
            StatusCode::UNAUTHORIZED => (
                ErrorKind::Unauthorized,
                "; renew the token or certificate, it is read again before each retry",
            ),
            StatusCode::FORBIDDEN if is_starting => {
                (ErrorKind::Refused, "; the API server is starting and may not know its roles yet")
            }
            StatusCode::FORBIDDEN if resource == PODS => (
                ErrorKind::Refused,
                "; grant list and watch of pods by a ClusterRole, as deploy/components/pod-annotations does, or leave out \
                 --pod-annotations",
            ),
            StatusCode::FORBIDDEN => (
                ErrorKind::Refused,
                "; grant list and watch of services, endpointslices, nodes and servicecidrs by a ClusterRole",
            ),
            StatusCode::TOO_MANY_REQUESTS => (ErrorKind::Overloaded, ""),
            _ => (ErrorKind::Other, ""),
        };
        let seconds = headers.get(RETRY_AFTER).and_then(|it| it.to_str().ok()?.trim().parse().ok());
        let details = status.and_then(|it| it.details).map(|it| u64::from(it.retry_after_seconds));
        Self {
            kind,
            text: format!("{resource}: {} {reason}: {message}{remedy}", code.as_u16()),
            retry_after: seconds.or(details.filter(|it| *it > 0)).map(Duration::from_secs),
        }
    }

    /// An event of type ERROR in a watch.
    pub(super) fn event(resource: &str, status: &Status) -> Self {
        let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(status).unwrap_or_default();
        Self::status(resource, code, &HeaderMap::new(), &body, false)
    }

    /// No response, or the end of a response before its end.
    pub(super) fn connection(resource: &str, error: &kube::Error) -> Self {
        let is_connect = match error {
            kube::Error::Service(error) => {
                error.downcast_ref::<HttpError>().is_none_or(HttpError::is_connect)
            }
            _ => false,
        };
        let cause = match error {
            kube::Error::Service(error) => error_chain(&**error),
            kube::Error::HyperError(error) => error_chain(error),
            other => error_chain(other),
        };
        // The CAs of clusters often have the same name: then the error is a bad signature.
        let is_unknown_ca = ["UnknownIssuer", "BadSignature"].iter().any(|it| cause.contains(it));
        let remedy = if is_unknown_ca {
            "; set certificate-authority in the kubeconfig to the CA that signed it"
        } else if cause.contains("certificate not valid for name") {
            "; use an address in the certificate for --kube-api-server, or set tls-server-name in the kubeconfig"
        } else if cause.contains("invalid peer certificate") {
            "; renew the API server's certificate, or correct this host's clock"
        } else {
            ""
        };
        Self::new(
            if is_connect { ErrorKind::NoConnection } else { ErrorKind::NoResponse },
            format!("{resource}: no connection to the API server: {cause}{remedy}"),
        )
    }
}

/// A text of the server, in one line that is not too long.
pub(super) fn quoted(text: &str) -> String {
    shortened(one_line(text), MAX_QUOTE)
}
