//! Credentials of a plugin, renewed before they end: no request waits for the plugin, which may take as long as it likes.
//!
//! The client library renews a token with the first request of its last minute, in a blocking thread.

use std::{future::ready, sync::Arc, time::Duration};

use http::{HeaderValue, Request, Response, header::AUTHORIZATION};
use kube::client::{Body, middleware::AuthLayer};
use model::error_chain;
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tower::{BoxError, Layer as _, ServiceExt as _, service_fn, util::BoxCloneService};

use super::timing::Timing;

/// The credentials of the next request. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct RenewedCredentials {
    /// `None` before the first ones; an error if there were never any.
    header: watch::Receiver<Option<Result<HeaderValue, String>>>,
    /// Ends with the last clone.
    _task: Arc<JoinSet<()>>,
}

impl RenewedCredentials {
    /// Starts to renew what the client library adds to a request. Must be called within a tokio runtime.
    pub(super) fn start(layer: AuthLayer, timing: &Timing) -> Self {
        let (sender, header) = watch::channel(None);
        Self { header, _task: Arc::new(JoinSet::from_iter([renew(layer, sender, timing.renewal)])) }
    }

    pub(super) async fn add_to(&self, mut request: Request<Body>) -> Result<Request<Body>, BoxError> {
        let mut header = self.header.clone();
        let header = header.wait_for(Option::is_some).await?.clone();
        if let Some(header) = header.transpose()? {
            request.headers_mut().insert(AUTHORIZATION, header);
        }
        Ok(request)
    }
}

async fn renew(
    layer: AuthLayer,
    header: watch::Sender<Option<Result<HeaderValue, String>>>,
    interval: Duration,
) {
    // What the layer adds to a request comes back as a response.
    let echo = |request: Request<Body>| {
        let mut response = Response::new(());
        *response.headers_mut() = request.into_parts().0.headers;
        ready(Ok::<_, BoxError>(response))
    };
    let plugin = BoxCloneService::new(layer.layer(service_fn(echo)));
    let mut is_failing = false;
    loop {
        let renewed = plugin.clone().oneshot(Request::new(Body::empty())).await;
        let renewed = renewed.and_then(|mut it| {
            it.headers_mut().remove(AUTHORIZATION).ok_or_else(|| "it has given no token".into())
        });
        let has_failed = renewed.is_err();
        match renewed {
            Ok(it) => drop(header.send_replace(Some(Ok(it)))),
            Err(error) => {
                let text = format!("the credential plugin: {}", error_chain(&*error));
                if header.borrow().as_ref().is_none_or(Result::is_err) {
                    header.send_replace(Some(Err(text)));
                } else if !is_failing {
                    tracing::warn!(error = text, "cannot renew the credentials; using the last ones");
                }
            }
        }
        is_failing = has_failed;
        sleep(interval).await;
    }
}
