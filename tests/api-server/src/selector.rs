//! Label and field selectors, as far as clients of this server use them.
//!
//! An unknown selector is rejected, never ignored.

use crate::objects::Object;

#[derive(Clone, Debug, Default)]
pub(crate) struct Selector(Vec<Requirement>);

#[derive(Clone, Debug)]
enum Requirement {
    NoLabel(String),
    Label(String, String),
    Name(String),
    NotClusterIp(String),
    NodeName(String),
}

impl Selector {
    pub(crate) fn parse(labels: &str, fields: &str, has_field_selectors: bool) -> Result<Self, String> {
        let mut requirements = Vec::new();
        for it in labels.split(',').filter(|it| !it.is_empty()) {
            requirements.push(match (it.strip_prefix('!'), it.split_once('=')) {
                (Some(key), _) => Requirement::NoLabel(key.into()),
                (None, Some((key, value))) => Requirement::Label(key.into(), value.into()),
                (None, None) => return Err(format!("unable to parse requirement: {it}")),
            });
        }
        for it in fields.split(',').filter(|it| !it.is_empty()) {
            requirements.push(match (it.split_once("!="), it.split_once('=')) {
                (Some(("spec.clusterIP", value)), _) if has_field_selectors => {
                    Requirement::NotClusterIp(value.into())
                }
                (None, Some(("metadata.name", value))) => Requirement::Name(value.into()),
                (None, Some(("spec.nodeName", value))) => Requirement::NodeName(value.into()),
                _ => return Err(format!("field label not supported: {it}")),
            });
        }
        Ok(Self(requirements))
    }

    pub(crate) fn matches(&self, object: &Object) -> bool {
        self.0.iter().all(|it| match it {
            Requirement::NoLabel(key) => !object.labels.contains_key(key),
            Requirement::Label(key, value) => object.labels.get(key) == Some(value),
            Requirement::Name(name) => object.name == *name,
            Requirement::NotClusterIp(it) => object.cluster_ip != *it,
            Requirement::NodeName(it) => object.node_name == *it,
        })
    }
}
