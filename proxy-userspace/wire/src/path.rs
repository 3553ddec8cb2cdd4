//! The paths of objects in the sets of `localv1`.

use model::{
    ServiceName,
    state::{Endpoint, EndpointKey},
};

/// The path of a Service in the services set.
pub fn service_path(name: &ServiceName) -> String {
    name.to_string()
}

/// The path of an endpoint in the endpoints set.
pub fn endpoint_path(service: &ServiceName, endpoint: &Endpoint) -> String {
    format!("{service}/{}", endpoint_key(endpoint))
}

/// The last part of the path of an endpoint.
pub fn endpoint_key(endpoint: &Endpoint) -> &str {
    match &endpoint.key {
        EndpointKey::Pod(key) | EndpointKey::Anonymous(key) => key,
    }
}
