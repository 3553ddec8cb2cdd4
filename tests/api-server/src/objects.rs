//! The objects, and the history of their changes.
//!
//! The one rule: every change has a version of its own, and versions only grow.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use serde_json::{Value, json};

/// One of the kinds that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// `v1 Service`.
    Services,
    /// `discovery.k8s.io/v1 EndpointSlice`.
    EndpointSlices,
    /// `v1 Node`.
    Nodes,
}

impl Resource {
    const ALL: [Self; 3] = [Self::Services, Self::EndpointSlices, Self::Nodes];

    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Services => "/api/v1/services",
            Self::EndpointSlices => "/apis/discovery.k8s.io/v1/endpointslices",
            Self::Nodes => "/api/v1/nodes",
        }
    }

    pub(crate) fn of_path(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.path() == path)
    }

    fn of_kind(kind: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.kind() == kind)
    }

    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::Services => "Service",
            Self::EndpointSlices => "EndpointSlice",
            Self::Nodes => "Node",
        }
    }

    pub(crate) fn version(self) -> &'static str {
        match self {
            Self::Services | Self::Nodes => "v1",
            Self::EndpointSlices => "discovery.k8s.io/v1",
        }
    }
}

/// An object as it was at one version.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) json: String,
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) cluster_ip: String,
}

/// What happened at one version.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) resource: Resource,
    pub(crate) before: Option<Arc<Object>>,
    pub(crate) after: Option<Arc<Object>>,
    /// The object that is gone, as it is told.
    pub(crate) farewell: Option<Arc<Object>>,
}

/// All objects.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    version: u64,
    /// By kind and `namespace/name`.
    objects: BTreeMap<(Resource, String), Arc<Object>>,
    history: VecDeque<Change>,
    /// What happened up to this version has been forgotten.
    forgotten: u64,
}

/// The longest history that is kept.
const HISTORY: usize = 10_000;

impl Objects {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn set(&mut self, mut value: Value) -> u64 {
        let kind = value["kind"].as_str().unwrap_or_default();
        let resource = Resource::of_kind(kind).unwrap_or_else(|| panic!("{kind:?} is none of the kinds"));
        let name = value["metadata"]["name"].as_str().expect("an object has a name").to_owned();
        let key = match resource {
            Resource::Nodes => name.clone(),
            _ => {
                let namespace = value["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
                value["metadata"]["namespace"] = json!(namespace);
                format!("{namespace}/{name}")
            }
        };
        self.version += 1;
        let object = Arc::new(stamped(value, name, self.version));
        let before = self.objects.insert((resource, key), Arc::clone(&object));
        self.remember(Change { version: self.version, resource, before, after: Some(object), farewell: None })
    }

    pub(crate) fn delete(&mut self, resource: Resource, key: &str) -> u64 {
        let Some(before) = self.objects.remove(&(resource, key.to_owned())) else { return self.version };
        self.version += 1;
        let value = serde_json::from_str(&before.json).expect("it was written by us");
        let farewell = Some(Arc::new(stamped(value, before.name.clone(), self.version)));
        self.remember(Change { version: self.version, resource, before: Some(before), after: None, farewell })
    }

    pub(crate) fn compact(&mut self) {
        self.history.clear();
        self.forgotten = self.version;
    }

    /// The objects of a kind after `key`, in the order of their keys.
    pub(crate) fn after<'a>(
        &'a self,
        resource: Resource,
        key: &str,
    ) -> impl Iterator<Item = (&'a str, &'a Arc<Object>)> {
        let first = (resource, format!("{key}\0"));
        let all = self.objects.range(first..).take_while(move |((it, _), _)| *it == resource);
        all.map(|((_, key), object)| (key.as_str(), object))
    }

    /// What happened after `version`; none if that has been forgotten.
    pub(crate) fn since(&self, version: u64) -> Option<impl Iterator<Item = &Change>> {
        let first = self.history.partition_point(|it| it.version <= version);
        (version >= self.forgotten).then(|| self.history.range(first..))
    }

    fn remember(&mut self, change: Change) -> u64 {
        self.history.push_back(change);
        if self.history.len() > HISTORY
            && let Some(oldest) = self.history.pop_front()
        {
            self.forgotten = oldest.version;
        }
        self.version
    }
}

/// The object with its version, and with the managed fields that every object has.
fn stamped(mut value: Value, name: String, version: u64) -> Object {
    let metadata = &mut value["metadata"];
    metadata["resourceVersion"] = json!(version.to_string());
    metadata["managedFields"] = json!([{
        "manager": "kube-controller-manager", "operation": "Update", "fieldsType": "FieldsV1",
        "time": "2026-01-01T00:00:00Z",
        "fieldsV1": {"f:metadata": {"f:labels": {".": {}, "f:kubernetes.io/service-name": {}}}, "f:spec": {".": {}}},
    }]);
    let labels = metadata["labels"].as_object().into_iter().flatten();
    Object {
        name,
        labels: labels.map(|(key, it)| (key.clone(), it.as_str().unwrap_or_default().into())).collect(),
        cluster_ip: value["spec"]["clusterIP"].as_str().unwrap_or_default().into(),
        json: value.to_string(),
    }
}
