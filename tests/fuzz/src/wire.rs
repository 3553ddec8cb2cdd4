//! Arbitrary bytes as a message of the contract.

use model::{RequestedMetadata, state::ServiceState};
use prost::Message as _;
use proxy_contract::localnetv1::ServiceEndpoints;
use wire::Extensions;

use crate::invariants;

/// A message that can be decoded is a Service's state, and that is the same after a round trip, with nothing rejected.
pub fn target(bytes: &[u8]) {
    let Ok(message) = ServiceEndpoints::decode(bytes) else { return };
    let Some(service) = &message.service else { return };
    let keys = message.keys.iter().map(String::as_str).chain(std::iter::repeat(""));
    let decoded =
        wire::service_state(service, keys.zip(&message.endpoints), &RequestedMetadata::everything());
    invariants::rejected(&decoded.rejected);
    if let Some(state) = &decoded.value {
        round_trip(state);
    }
}

/// Checks a state, and that a round trip through the wire format does not change it.
pub fn round_trip(state: &ServiceState) {
    invariants::service_state(state);
    let service = wire::service_with_extensions(state, Extensions::LOCAL);
    let endpoints: Vec<_> = state
        .endpoints
        .iter()
        .map(|it| (wire::endpoint_key(it), wire::endpoint(&state.service, it)))
        .collect();
    let endpoints = endpoints.iter().map(|(key, it)| (*key, it));
    let back = wire::service_state(&service, endpoints, &RequestedMetadata::everything());
    assert_eq!(back.rejected, [], "nothing that we encode is rejected");
    let back = back.value.expect("an encoded state can be decoded");
    assert_eq!((&back, back.trigger_time), (state, state.trigger_time));
}
