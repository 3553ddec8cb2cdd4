//! What the fuzz targets call: a reflector with arbitrary answers of an API server.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use model::{Rejected, Rejections};
use serde_json::Value;

use super::{
    list_items::ListItems,
    options::{Options, Selectors},
    reflector::Reflector,
    resource::RESOURCES,
    shared::Shared,
    shared_client::SharedClient,
};

/// What a reflector says about what it was sent.
#[derive(Debug, Default)]
pub struct Messages {
    /// What it rejects.
    pub rejected: Vec<Rejected>,
    /// The errors that would be logged.
    pub errors: Vec<String>,
}

/// Reflectors that are connected to nothing.
#[derive(Debug)]
pub struct Reflectors {
    options: Options,
    client: Arc<SharedClient>,
    shared: Arc<Shared>,
}

impl Reflectors {
    /// Must be called within a tokio runtime.
    #[expect(clippy::new_without_default, reason = "it panics without a runtime")]
    pub fn new() -> Self {
        let server = "http://127.0.0.1:1".to_owned();
        let mut options = Options::default();
        options.client_config.server = Some(server);
        let made = SharedClient::new(&options.client_config, options.timing);
        let (server, client) = made.expect("no file is read");
        Self { options, client: client.into(), shared: Shared::new(&server).into() }
    }

    /// A list of a kind, as it arrives in fragments: as one fragment it has the same objects, and as a JSON parser finds them.
    pub fn list(&self, kind: u8, size: usize, body: &[u8]) -> Messages {
        let mut messages = Messages::default();
        let (objects, metadata) = split(body, size.max(1));
        let (whole, whole_metadata) = split(body, body.len().max(1));
        assert_eq!(objects, whole, "the fragments do not matter");
        assert_eq!(metadata.ok(), whole_metadata.ok());
        if let Some(parsed) = items(body) {
            let values: Vec<Value> =
                objects.iter().filter_map(|it| serde_json::from_slice(it).ok()).collect();
            assert_eq!(values, parsed, "the objects are those of the list");
        }
        let mut reflector = self.reflector(kind);
        reflector.store.begin_list();
        for object in &objects {
            messages.errors.extend(reflector.item(object).err().map(|it| it.to_string()));
        }
        reflector.store.end_list();
        assert!(reflector.store.objects.len() <= objects.len());
        messages.rejected = rejected(&mut reflector);
        messages
    }

    /// The lines of a watch of a kind: each event changes something at most once.
    pub fn watch(&self, kind: u8, body: &[u8]) -> Messages {
        let mut messages = Messages::default();
        let mut reflector = self.reflector(kind);
        for line in body.split(|it| *it == b'\n') {
            let first = reflector.event(line);
            drop(reflector.store.take_changes());
            messages.rejected = rejected(&mut reflector);
            if first.is_ok() && reflector.event(line).is_ok() {
                assert!(
                    reflector.store.take_changes().is_empty(),
                    "an event changes nothing the second time"
                );
                assert_eq!(rejected(&mut reflector), messages.rejected);
            }
            messages.errors.extend(first.err().map(|it| it.to_string()));
        }
        messages
    }

    fn reflector(&self, kind: u8) -> Reflector {
        let resource = &RESOURCES[usize::from(kind % 4)];
        Reflector::new(&self.options, &self.client, resource, Selectors::default(), &self.shared)
    }
}

/// The objects of a list that arrives in fragments, and its metadata.
fn split(body: &[u8], size: usize) -> (Vec<Vec<u8>>, Result<ListMeta, String>) {
    let (mut list, mut objects) = (ListItems::default(), Vec::new());
    for data in body.chunks(size) {
        let result: Result<(), String> = list.read(data, |it| {
            objects.push(it.to_vec());
            Ok(())
        });
        result.expect("every object is taken");
    }
    (objects, list.finish().map_err(|it| it.to_string()))
}

/// The objects of a list as a parser finds them; `None` if it is none, or has the name of its objects in another place, too.
fn items(body: &[u8]) -> Option<Vec<Value>> {
    let text = std::str::from_utf8(body).ok().filter(|it| !it.contains('\\'))?;
    let list: Value = serde_json::from_str(text).ok()?;
    let items = list.as_object()?.get("items")?.as_array()?;
    let is_plain = text.matches("\"items\"").count() == 1 && items.iter().all(Value::is_object);
    is_plain.then(|| items.clone())
}

/// What was rejected last.
fn rejected(reflector: &mut Reflector) -> Vec<Rejected> {
    let mut rejections = Rejections::default();
    reflector.store.take_rejected(&mut rejections);
    rejections.iter().cloned().collect()
}
