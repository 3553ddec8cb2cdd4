//! Reads the labels and annotations of a Service that are requested.
//!
//! Invariant: while none are requested, nothing is read.

use std::collections::BTreeMap;

use model::{RequestedMetadata, cluster};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{
    conversion::Converted,
    objects::{any_text, or_default},
    validation::{Validator, short},
};

#[derive(Default, Deserialize)]
struct Object {
    #[serde(default, deserialize_with = "or_default")]
    metadata: Metadata,
}

#[derive(Default, Deserialize)]
struct Metadata {
    #[serde(default, deserialize_with = "texts")]
    labels: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "texts")]
    annotations: BTreeMap<String, String>,
}

/// Adds the requested labels and annotations to a Service that was converted from `object`.
pub(super) fn add_metadata<'de>(
    converted: &mut Converted<cluster::Service>,
    requested: &RequestedMetadata,
    object: impl Deserializer<'de>,
) {
    let Some(service) = converted.object.as_mut().filter(|_| !requested.is_empty()) else { return };
    // It was decoded before, to the fields that are needed.
    let Object { metadata } = Object::deserialize(object).unwrap_or_default();
    let mut validator = Validator::new(format!("Service {}", service.name));
    service.metadata = requested.select(&metadata.labels, &metadata.annotations, |field, name, reason| {
        validator.reject(format_args!("metadata.{field}[{}]", short(name)), reason);
    });
    converted.rejected.extend(validator.into_rejected());
}

fn texts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    let values: BTreeMap<String, Value> = or_default(deserializer)?;
    Ok(values.into_iter().map(|(name, value)| (name, any_text(value))).collect())
}
