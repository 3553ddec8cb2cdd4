//! Arbitrary bytes as a message of the contract.

use std::iter;

use model::{RequestedMetadata, state::ServiceState};
use prost::Message as _;
use proxy_contract::localnetv1::ServiceEndpoints;
use wire::{Decoded, Extensions};

use crate::invariants;

/// A message that can be decoded is a Service's state, and that is the same after a round trip, with nothing rejected.
pub fn target(bytes: &[u8]) {
    let Some(decoded) = decode(bytes) else { return };
    invariants::rejected(&decoded.rejected);
    if let Some(state) = &decoded.value {
        round_trip(state);
    }
}

fn decode(bytes: &[u8]) -> Option<Decoded<Option<ServiceState>>> {
    let message = ServiceEndpoints::decode(bytes).ok()?;
    let service = message.service.as_ref()?;
    let keys = message.keys.iter().map(String::as_str).chain(iter::repeat(""));
    Some(wire::service_state(service, keys.zip(&message.endpoints), &RequestedMetadata::everything()))
}

/// Checks a state, and that a round trip through the bytes of the wire format does not change it.
pub fn round_trip(state: &ServiceState) {
    invariants::service_state(state);
    let message = ServiceEndpoints {
        service: Some(wire::service_with_extensions(state, Extensions::LOCAL)),
        endpoints: state.endpoints.iter().map(|it| wire::endpoint(&state.service, it)).collect(),
        keys: state.endpoints.iter().map(|it| wire::endpoint_key(it).to_owned()).collect(),
    };
    let back = decode(&message.encode_to_vec()).expect("what we encode is a message");
    assert_eq!(back.rejected, [], "nothing that we encode is rejected");
    let back = back.value.expect("an encoded state can be decoded");
    assert_eq!((&back, back.trigger_time), (state, state.trigger_time));
}
