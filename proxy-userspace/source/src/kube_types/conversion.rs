//! What all conversions share.

use std::sync::Arc;

use k8s_openapi::jiff;
use model::{NameForm, Rejected, Timestamp, cluster::Object};

use super::{
    objects::Metadata,
    validation::{Validator, short},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted<T> {
    /// The object; `None` if its name is invalid, or if it is of no interest.
    pub object: Option<T>,
    pub rejected: Vec<Rejected>,
}

impl<T> Converted<T> {
    /// Wraps the object as one of any kind.
    pub(crate) fn of_kind(self, kind: fn(Arc<T>) -> Object) -> Converted<Object> {
        Converted { object: self.object.map(|it| kind(Arc::new(it))), rejected: self.rejected }
    }
}

/// The namespace of an object without one, as in `kubectl`.
const DEFAULT_NAMESPACE: &str = "default";

/// A validator of an object; its messages name the object as `Service default/web`.
pub(super) fn validator(kind: &str, meta: &Metadata) -> Validator {
    let name = short(meta.name.as_deref().unwrap_or(""));
    Validator::new(match meta.namespace.as_deref() {
        _ if ["Node", "ServiceCIDR"].contains(&kind) => format!("{kind} {name}"),
        None | Some("") => format!("{kind} {DEFAULT_NAMESPACE}/{name}"),
        Some(namespace) => format!("{kind} {}/{name}", short(namespace)),
    })
}

/// Namespace and name of an object, if both are valid.
pub(super) fn names_of(
    meta: &Metadata,
    form: NameForm,
    validator: &mut Validator,
) -> Option<(Arc<str>, Arc<str>)> {
    let name = validator.name("metadata.name", meta.name.as_deref().unwrap_or(""), form)?;
    let namespace = match meta.namespace.as_deref() {
        None | Some("") => DEFAULT_NAMESPACE,
        Some(namespace) => namespace,
    };
    Some((validator.name("metadata.namespace", namespace, NameForm::DnsLabel)?, name))
}

/// A time, to the microsecond.
pub(super) fn timestamp(time: jiff::Timestamp) -> Timestamp {
    Timestamp::from_micros(time.as_microsecond())
}
