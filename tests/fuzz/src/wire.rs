//! Any bytes as a message.

use model::state::ServiceState;
use prost::Message as _;
use proxy_contract::localnetv1::ServiceEndpoints;
use wire::Extensions;

use crate::laws;

/// What can be read of a message is a state; and a state is the same after there and back, with nothing refused.
pub fn target(bytes: &[u8]) {
    let Ok(message) = ServiceEndpoints::decode(bytes) else { return };
    let Some(service) = &message.service else { return };
    let keys = message.keys.iter().map(String::as_str).chain(std::iter::repeat(""));
    let decoded = wire::service_state(service, keys.zip(&message.endpoints));
    laws::rejected(&decoded.rejected);
    if let Some(state) = &decoded.value {
        there_and_back(state);
    }
}

/// Checks a state, and that it survives the wire.
pub fn there_and_back(state: &ServiceState) {
    laws::service_state(state);
    let service = wire::service_with_extensions(state, Extensions::LOCAL);
    let endpoints: Vec<_> = state
        .endpoints
        .iter()
        .map(|it| (wire::endpoint_key(it), wire::endpoint(&state.service, it)))
        .collect();
    let back = wire::service_state(&service, endpoints.iter().map(|(key, it)| (*key, it)));
    assert_eq!(back.rejected, [], "nothing of what we say is refused");
    let back = back.value.expect("what was a state is one");
    assert_eq!((&back, back.trigger_time), (state, state.trigger_time));
}
