//! Posts Kubernetes Events, which `kubectl describe` shows with an object.
//!
//! Posting is best effort: nothing waits for it, and a failure is only logged.

use std::time::Duration;

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, api::PostParams};
use model::{ServiceName, error_chain};
use tokio::time::timeout;
use twox_hash::XxHash64;

use super::{client_config::ClientConfig, timing::Timing, watch_error::WatchError};

/// The `reportingController`.
const CONTROLLER: &str = "kube-proxy-ebpf";
/// Limit of `reportingInstance`, in bytes.
const MAX_INSTANCE: usize = 128;
/// Limit of `note`, in bytes.
const MAX_NOTE: usize = 1024;
const POST_TIMEOUT: Duration = Duration::from_secs(10);

/// Posts Events to an API server.
#[derive(Debug)]
pub struct EventRecorder {
    client_config: ClientConfig,
    instance: String,
    /// Whether the last post failed, which has been logged.
    is_failing: bool,
}

/// What happened to a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceEvent {
    /// The Service.
    pub service: ServiceName,
    /// Whether it is a problem.
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
    /// A recorder for the node with this name; does not connect yet.
    pub fn new(client_config: ClientConfig, node: &str) -> Self {
        let instance = truncated(format!("{CONTROLLER}-{node}"), MAX_INSTANCE);
        Self { client_config, instance, is_failing: false }
    }

    /// Posts an Event. Of several failures in a row, only the first is logged as a warning.
    pub async fn post(&mut self, event: ServiceEvent) {
        let text = format!("cannot post the event {} of Service {}", event.reason, event.service);
        let result = timeout(POST_TIMEOUT, self.create(event)).await;
        let error = match result {
            Ok(Ok(())) => {
                self.is_failing = false;
                return;
            }
            Ok(Err(error)) => error,
            Err(_) => format!("no response within {POST_TIMEOUT:?}"),
        };
        if std::mem::replace(&mut self.is_failing, true) {
            tracing::debug!("{text}: {error}");
        } else {
            tracing::warn!("{text}: {error}; the event is dropped, Services are not affected");
        }
    }

    async fn create(&self, event: ServiceEvent) -> Result<(), String> {
        // Events are rare, and the credentials may have been renewed.
        let (_, client) = self.client_config.client(&Timing::default()).map_err(|it| error_chain(&it))?;
        let event = self.event(event, Timestamp::now());
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api = Api::<Event>::namespaced(client, &namespace);
        match api.create(&PostParams::default(), &event).await {
            Ok(_) => Ok(()),
            // It was posted before, perhaps by another node.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 403 => {
                Err(format!("{}; grant create of events.k8s.io events by a ClusterRole", status.message))
            }
            Err(kube::Error::Api(status)) => Err(status.message.clone()),
            Err(error) => Err(WatchError::connection("events", &error).text),
        }
    }

    /// The fields as kube-proxy sets them, except for the Service's uid, which is not known.
    fn event(&self, event: ServiceEvent, now: Timestamp) -> Event {
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
            reporting_instance: Some(self.instance.clone()),
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
}

fn truncated(mut text: String, max_bytes: usize) -> String {
    text.truncate(text.floor_char_boundary(max_bytes));
    text
}
