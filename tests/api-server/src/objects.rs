//! The objects and the history of their changes.
//!
//! Every change has a resource version of its own, and versions only increase.

use std::{
    borrow::Cow,
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use serde_json::{Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// `v1 Service`.
    Services,
    /// `discovery.k8s.io/v1 EndpointSlice`.
    EndpointSlices,
    /// `v1 Node`.
    Nodes,
    /// `networking.k8s.io/v1 ServiceCIDR`.
    ServiceCidrs,
    /// `v1 Pod`, of which only metadata is served.
    Pods,
}

impl Resource {
    const ALL: [Self; 5] =
        [Self::Services, Self::EndpointSlices, Self::Nodes, Self::ServiceCidrs, Self::Pods];

    /// Its kind, its group with the version, and the last part of its path.
    pub(crate) fn names(self) -> [&'static str; 3] {
        match self {
            Self::Services => ["Service", "v1", "services"],
            Self::EndpointSlices => ["EndpointSlice", "discovery.k8s.io/v1", "endpointslices"],
            Self::Nodes => ["Node", "v1", "nodes"],
            Self::ServiceCidrs => ["ServiceCIDR", "networking.k8s.io/v1", "servicecidrs"],
            Self::Pods => ["Pod", "v1", "pods"],
        }
    }

    pub(crate) fn of_path(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| {
            let [_, group, name] = it.names();
            let root = if group == "v1" { "api" } else { "apis" };
            path == format!("/{root}/{group}/{name}")
        })
    }

    fn of_kind(kind: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.names()[0] == kind)
    }
}

/// An object at one version.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) json: String,
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) cluster_ip: String,
    pub(crate) node_name: String,
}

impl Object {
    /// In the form in which objects of this kind are served.
    pub(crate) fn served(&self, resource: Resource) -> Cow<'_, str> {
        if resource != Resource::Pods {
            return Cow::Borrowed(&self.json);
        }
        let value: Value = serde_json::from_str(&self.json).expect("stored objects are JSON");
        let (kind, version) = ("PartialObjectMetadata", "meta.k8s.io/v1");
        json!({"kind": kind, "apiVersion": version, "metadata": value["metadata"]}).to_string().into()
    }
}

/// The change of one version.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) resource: Resource,
    key: String,
    pub(crate) before: Option<Arc<Object>>,
    /// The object at this version, also if it was deleted: so a watch reports it.
    pub(crate) now: Arc<Object>,
    pub(crate) is_deleted: bool,
}

#[derive(Debug)]
pub(crate) struct Objects {
    pub(crate) version: u64,
    /// By kind and `namespace/name`.
    objects: BTreeMap<(Resource, String), Arc<Object>>,
    history: VecDeque<Change>,
    /// The history up to this version was dropped.
    pub(crate) compacted: u64,
}

const MAX_HISTORY: usize = 10_000;

impl Default for Objects {
    /// No objects. The version is not 0, which in a request means "any".
    fn default() -> Self {
        Self { version: 1, objects: BTreeMap::new(), history: VecDeque::new(), compacted: 0 }
    }
}

impl Objects {
    pub(crate) fn set(&mut self, mut value: Value) -> u64 {
        let kind = value["kind"].as_str().unwrap_or_default();
        let resource = Resource::of_kind(kind).unwrap_or_else(|| panic!("unknown kind {kind:?}"));
        let name = value["metadata"]["name"].as_str().expect("an object has a name").to_owned();
        let key = match resource {
            Resource::Nodes | Resource::ServiceCidrs => name.clone(),
            _ => {
                let namespace = value["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
                value["metadata"]["namespace"] = json!(namespace);
                format!("{namespace}/{name}")
            }
        };
        self.version += 1;
        let object = Arc::new(with_version(value, name, self.version));
        let before = self.objects.insert((resource, key.clone()), Arc::clone(&object));
        self.record(Change { version: self.version, resource, key, before, now: object, is_deleted: false })
    }

    pub(crate) fn delete(&mut self, resource: Resource, key: &str) -> u64 {
        let Some(before) = self.objects.remove(&(resource, key.to_owned())) else { return self.version };
        self.version += 1;
        let value = serde_json::from_str(&before.json).expect("stored objects are JSON");
        let now = Arc::new(with_version(value, before.name.clone(), self.version));
        let (key, before) = (key.to_owned(), Some(before));
        self.record(Change { version: self.version, resource, key, before, now, is_deleted: true })
    }

    pub(crate) fn compact(&mut self) {
        self.history.clear();
        self.compacted = self.version;
    }

    /// Goes back to the objects as they were at a version that was not dropped, and forgets everything since.
    pub(crate) fn restore(&mut self, version: u64) {
        while let Some(change) = self.history.pop_back_if(|it| it.version > version) {
            let key = (change.resource, change.key);
            match change.before {
                Some(before) => drop(self.objects.insert(key, before)),
                None => drop(self.objects.remove(&key)),
            }
        }
        self.version = version;
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

    /// The objects of a kind as they were at a version that was not dropped.
    pub(crate) fn at(&self, resource: Resource, version: u64) -> BTreeMap<String, Arc<Object>> {
        let mut objects: BTreeMap<_, _> =
            self.after(resource, "").map(|(key, it)| (key.to_owned(), Arc::clone(it))).collect();
        let later = self.history.iter().rev().take_while(|it| it.version > version);
        for change in later.filter(|it| it.resource == resource) {
            match &change.before {
                Some(before) => drop(objects.insert(change.key.clone(), Arc::clone(before))),
                None => drop(objects.remove(&change.key)),
            }
        }
        objects
    }

    /// The changes after `version`; `None` if some were dropped.
    pub(crate) fn since(&self, version: u64) -> Option<impl Iterator<Item = &Change>> {
        let first = self.history.partition_point(|it| it.version <= version);
        (version >= self.compacted).then(|| self.history.range(first..))
    }

    fn record(&mut self, change: Change) -> u64 {
        self.history.push_back(change);
        if self.history.len() > MAX_HISTORY
            && let Some(oldest) = self.history.pop_front()
        {
            self.compacted = oldest.version;
        }
        self.version
    }
}

/// An object with its resource version, and with managed fields as every object has them.
fn with_version(mut value: Value, name: String, version: u64) -> Object {
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
        node_name: value["spec"]["nodeName"].as_str().unwrap_or_default().into(),
        json: value.to_string(),
    }
}
