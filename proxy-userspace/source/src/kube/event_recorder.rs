//! Posts Kubernetes Events, which `kubectl describe` shows with an object.
//!
//! Posting is best effort: nothing waits for it, and a failure is only logged. Events go over the connection of the watches, in
//! the source's runtime: each node has one connection and one set of credentials.
//! May know: the API. What an Event is about, and when it is due, is decided by who posts it.

use std::{sync::Arc, time::Duration};

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, api::PostParams};
use model::ServiceName;
use tokio::{runtime::Handle, time::timeout};
use twox_hash::XxHash64;

use super::{shared_client::SharedClient, watch_error::WatchError};

/// The `reportingController`.
const CONTROLLER: &str = "kube-proxy-ebpf";
/// Limit of `reportingInstance`, in bytes.
const MAX_INSTANCE: usize = 128;
/// Limit of `note`, in bytes.
const MAX_NOTE: usize = 1024;
const POST_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct EventRecorder {
    client: Arc<SharedClient>,
    /// The runtime of the source.
    runtime: Handle,
    instance: Arc<str>,
    /// Whether the last post failed, which has been logged.
    is_failing: bool,
}

/// What happened to a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceEvent {
    pub service: ServiceName,
    pub is_warning: bool,
    /// The reason in one word, for programs.
    pub reason: &'static str,
    /// The action that was taken, or failed.
    pub action: &'static str,
    /// The description for users.
    pub note: String,
    /// Whether every node may post the same; then the first one does.
    pub is_of_cluster: bool,
}

impl EventRecorder {
    pub(super) fn new(client: Arc<SharedClient>, runtime: Handle, node: &str) -> Self {
        let instance = truncated(format!("{CONTROLLER}-{node}"), MAX_INSTANCE).into();
        Self { client, runtime, instance, is_failing: false }
    }

    /// Posts an Event. Of several failures in a row, only the first is logged as a warning.
    pub async fn post(&mut self, event: ServiceEvent) {
        let (service, reason) = (event.service.clone(), event.reason);
        let event = to_object(event, &self.instance, Timestamp::now());
        let client = Arc::clone(&self.client);
        let created = self.runtime.spawn(timeout(POST_TIMEOUT, async move { create(&client, &event).await }));
        let error = match created.await {
            Ok(Ok(Ok(()))) => {
                self.is_failing = false;
                return;
            }
            Ok(Ok(Err(error))) => error,
            Ok(Err(_)) => format!("no response within {POST_TIMEOUT:?}"),
            // The source has ended.
            Err(error) => error.to_string(),
        };
        if std::mem::replace(&mut self.is_failing, true) {
            tracing::debug!(%service, reason, error, "cannot post the event");
        } else {
            tracing::warn!(%service, reason, error, "cannot post the event; it is dropped, Services are not affected");
        }
    }
}

/// Posts an Event; once more, if the credentials were not valid any more.
async fn create(client: &Arc<SharedClient>, event: &Event) -> Result<(), String> {
    let namespace = event.metadata.namespace.as_deref().unwrap_or_default();
    let mut is_retry = false;
    loop {
        let used = client.get();
        let api = Api::<Event>::namespaced(used.client.clone(), namespace);
        return match api.create(&PostParams::default(), event).await {
            Ok(_) => Ok(()),
            // It was posted before, perhaps by another node.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 401 && !is_retry => {
                client.reload(&used, true).await?;
                is_retry = true;
                continue;
            }
            Err(kube::Error::Api(status)) if status.code == 403 => {
                Err(format!("{}; grant create of events.k8s.io events by a ClusterRole", status.message))
            }
            Err(kube::Error::Api(status)) => Err(status.message.clone()),
            Err(error) => Err(WatchError::connection("events", &error).text),
        };
    }
}

/// The fields as kube-proxy sets them, except for the Service's uid, which is not known.
fn to_object(event: ServiceEvent, instance: &str, now: Timestamp) -> Event {
    let ServiceEvent { service, is_warning, reason, action, note, is_of_cluster } = event;
    let namespace = Some(service.namespace.to_string());
    let id = match is_of_cluster {
        true => u128::from(XxHash64::oneshot(0, format!("{reason} {note}").as_bytes())),
        false => now.as_nanosecond().unsigned_abs(),
    };
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{}.{id:x}", service.name)),
            namespace: namespace.clone(),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(CONTROLLER.into()),
        reporting_instance: Some(instance.to_owned()),
        type_: Some(if is_warning { "Warning" } else { "Normal" }.into()),
        reason: Some(reason.into()),
        action: Some(action.into()),
        note: Some(truncated(note, MAX_NOTE)),
        regarding: Some(ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Service".into()),
            namespace,
            name: Some(service.name.to_string()),
            ..ObjectReference::default()
        }),
        ..Event::default()
    }
}

fn truncated(mut text: String, max_bytes: usize) -> String {
    text.truncate(text.floor_char_boundary(max_bytes));
    text
}
