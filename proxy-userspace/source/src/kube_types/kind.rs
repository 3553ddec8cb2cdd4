//! The kinds of objects that are read, and their conversion.
//!
//! Invariant: objects are decoded one by one, straight into the fields that are needed.

use std::sync::Arc;

use model::{
    RequestedMetadata, ServiceName,
    cluster::{Object, ObjectName, SliceName},
};
use serde::{Deserialize, Deserializer};

use super::{
    conversion::Converted,
    endpoint_slice::{endpoint_slice, missing_field},
    metadata::add_metadata,
    node::node,
    objects::{self, Metadata},
    pod::pod,
    service::service,
    service_cidr::service_cidr,
};

/// A kind of objects that are read; in the order of the watched resources, the required ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Service,
    EndpointSlice,
    Node,
    ServiceCidr,
    Pod,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Service, Self::EndpointSlice, Self::Node, Self::ServiceCidr, Self::Pod];

    /// Its `apiVersion` and `kind`.
    pub(crate) fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Service => ("v1", "Service"),
            Self::EndpointSlice => ("discovery.k8s.io/v1", "EndpointSlice"),
            Self::Node => ("v1", "Node"),
            Self::ServiceCidr => ("networking.k8s.io/v1", "ServiceCIDR"),
            Self::Pod => ("v1", "Pod"),
        }
    }

    pub(crate) fn of(version: &str, kind: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.names() == (version, kind))
    }

    /// The identity of an object with this metadata.
    pub(crate) fn name_of(self, metadata: &Metadata) -> ObjectName {
        let [namespace, name]: [Arc<str>; 2] =
            [&metadata.namespace, &metadata.name].map(|it| it.as_deref().unwrap_or("").into());
        match self {
            Self::Service => ObjectName::Service(ServiceName { namespace, name }),
            Self::EndpointSlice => ObjectName::EndpointSlice(SliceName { namespace, name }),
            Self::Node => ObjectName::Node(name),
            Self::ServiceCidr => ObjectName::ServiceCidr(name),
            Self::Pod => ObjectName::Pod(format!("{namespace}/{name}").into()),
        }
    }

    /// Converts an object, with its requested labels and annotations; returns its metadata, too. Of a manifest, fields that an
    /// API server adds must be there.
    ///
    /// # Errors
    ///
    /// If it cannot be decoded: the field and the reason.
    pub(crate) fn convert<'de, D: Deserializer<'de> + Copy>(
        self,
        object: D,
        requested: &RequestedMetadata,
        is_manifest: bool,
    ) -> Result<(Converted<Object>, Metadata), String> {
        Ok(match self {
            Self::Service => {
                let it: objects::Service = decode(object)?;
                let mut converted = service(&it);
                add_metadata(&mut converted, requested, object);
                (converted.of_kind(Object::Service), it.metadata)
            }
            Self::EndpointSlice => {
                let it: objects::EndpointSlice = decode(object)?;
                let mut converted = endpoint_slice(&it);
                if is_manifest {
                    converted.rejected.extend(missing_field(&it));
                }
                (converted.of_kind(Object::EndpointSlice), it.metadata)
            }
            Self::Node => {
                let it: objects::Node = decode(object)?;
                (node(&it).of_kind(Object::Node), it.metadata)
            }
            Self::ServiceCidr => {
                let it: objects::ServiceCidr = decode(object)?;
                (service_cidr(&it).of_kind(Object::ServiceCidr), it.metadata)
            }
            Self::Pod => {
                let it: objects::Pod = decode(object)?;
                (pod(&it).of_kind(Object::Pod), it.metadata)
            }
        })
    }
}

/// Decodes an object; the error names the offending field.
fn decode<'de, T: Deserialize<'de>, D: Deserializer<'de> + Copy>(object: D) -> Result<T, String> {
    // The path of an error is collected only where there is one.
    T::deserialize(object).or_else(|_| {
        serde_path_to_error::deserialize(object)
            .map_err(|error| format!("{}: {}", error.path(), error.inner()))
    })
}
