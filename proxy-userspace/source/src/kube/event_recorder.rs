//! EventRecorder: what people find beside an object when they ask what is wrong with it.
//!
//! The one rule: nobody waits for an event, and nothing depends on one. EventType cannot be posted is logged and forgotten.

use std::time::Duration;

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, api::PostParams};
use model::ServiceName;
use tokio::time::timeout;

use super::{
    client_config::ClientConfig,
    watch_error::{WatchError, chain},
};

/// Who says it.
const CONTROLLER: &str = "kube-proxy-ebpf";
/// The longest `reportingInstance`, and the longest `note`, in bytes.
const LONGEST: (usize, usize) = (128, 1024);
/// How long to wait for the API server.
const PATIENCE: Duration = Duration::from_secs(10);

/// Posts events to an API server.
#[derive(Debug)]
pub struct EventRecorder {
    access: ClientConfig,
    instance: String,
    /// Whether it was said that events cannot be posted.
    said: bool,
}

/// Something that is wrong with a Service on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarningEvent {
    /// The Service.
    pub service: ServiceName,
    /// EventType is wrong, in one word, for programs.
    pub reason: &'static str,
    /// EventType was tried.
    pub action: &'static str,
    /// The same for people.
    pub note: String,
}

impl EventRecorder {
    /// EventRecorder of the node of this name. Nobody is asked anything yet.
    pub fn new(access: ClientConfig, node: &str) -> Self {
        let instance = cut(format!("{CONTROLLER}-{node}"), LONGEST.0);
        Self { access, instance, said: false }
    }

    /// Posts an event, or says why that cannot be done: once in a way that is seen, until it can be.
    pub async fn post(&mut self, warning: WarningEvent) {
        let text = format!("event {} of {}", warning.reason, warning.service);
        let result = timeout(PATIENCE, self.create(warning)).await;
        let error = match result {
            Ok(Ok(())) => {
                self.said = false;
                return;
            }
            Ok(Err(error)) => error,
            Err(_) => format!("the server has not answered for {PATIENCE:?}"),
        };
        if std::mem::replace(&mut self.said, true) {
            tracing::debug!("{text} cannot be posted: {error}");
        } else {
            tracing::warn!("{text} cannot be posted: {error}; nothing depends on it");
        }
    }

    async fn create(&self, warning: WarningEvent) -> Result<(), String> {
        // There are few of them, and what is shown may have been renewed.
        let (_, client) = self.access.client().map_err(|it| chain(&it))?;
        let event = self.event(warning, Timestamp::now());
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api = Api::<Event>::namespaced(client, &namespace);
        match api.create(&PostParams::default(), &event).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 403 => Err(format!(
                "{}; allow it by a ClusterRole with the verb create for events of events.k8s.io",
                status.message
            )),
            Err(kube::Error::Api(status)) => Err(status.message.clone()),
            Err(error) => Err(WatchError::connection("events", &error).text),
        }
    }

    /// As kube-proxy writes them; but without an id of the Service, which is not known here.
    fn event(&self, WarningEvent { service, reason, action, note }: WarningEvent, now: Timestamp) -> Event {
        let namespace = Some(service.namespace.to_string());
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{}.{:x}", service.name, now.as_nanosecond())),
                namespace: namespace.clone(),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            reporting_controller: Some(CONTROLLER.into()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some("WarningEvent".into()),
            reason: Some(reason.into()),
            action: Some(action.into()),
            note: Some(cut(note, LONGEST.1)),
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

/// The beginning of a text, of so many bytes at most.
fn cut(mut text: String, longest: usize) -> String {
    text.truncate(text.floor_char_boundary(longest));
    text
}
