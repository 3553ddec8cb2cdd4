//! Encodes and decodes how connections to a Service are spread over its endpoints.

use std::num::{NonZeroU8, NonZeroU32};

use model::state::{Algorithm, ExternalForwarding, LoadBalancing, PassiveHealth};
use proxy_contract::localv1::{self, load_balancing};

use crate::reader::Reader;

/// The message; none if everything is the default.
pub(crate) fn encode(it: LoadBalancing) -> Option<localv1::LoadBalancing> {
    if it == LoadBalancing::default() {
        return None;
    }
    let algorithm = match it.algorithm {
        Algorithm::Random => load_balancing::Algorithm::Random,
        Algorithm::LeastConnections => load_balancing::Algorithm::LeastConnections,
    };
    let PassiveHealth { enabled, failures, max_ejected_percent } = it.passive_health;
    let passive_health = localv1::PassiveHealth {
        enabled,
        failures: failures.map(|it| it.get().into()),
        max_ejected_percent: max_ejected_percent.map(|it| it.get().into()),
    };
    let says_health = it.passive_health != PassiveHealth::default();
    Some(localv1::LoadBalancing {
        algorithm: algorithm.into(),
        passive_health: says_health.then_some(passive_health),
        slow_start_seconds: it.slow_start.map_or(0, |it| it.get().into()),
        drain_seconds: it.drain.map_or(0, NonZeroU32::get),
        udp_to_packets: it.udp_to_packets,
        dsr: it.external_forwarding.map(|it| it == ExternalForwarding::Dsr),
    })
}

/// Decodes the message. Invalid values are rejected, and replaced by their defaults.
pub(crate) fn decode(reader: &mut Reader, message: localv1::LoadBalancing) -> LoadBalancing {
    let algorithm = match load_balancing::Algorithm::try_from(message.algorithm) {
        Ok(load_balancing::Algorithm::Random) => Algorithm::Random,
        Ok(load_balancing::Algorithm::LeastConnections) => Algorithm::LeastConnections,
        Err(_) => {
            let reason = format!("unknown algorithm {}; Random is used", message.algorithm);
            reader.reject("load_balancing.algorithm", reason);
            Algorithm::Random
        }
    };
    let health = message.passive_health.unwrap_or_default();
    let mut number = |field, number: u32, max: u32| {
        let valid = NonZeroU32::new(number).filter(|it| it.get() <= max);
        if valid.is_none() {
            let reason = format!("{number} is ignored; it must be 1 to {max}");
            reader.reject(&format!("load_balancing.{field}"), reason);
        }
        valid
    };
    let mut small = |field, it: Option<u32>, max: u8| -> Option<NonZeroU8> {
        number(field, it?, max.into())?.try_into().ok()
    };
    let failures = small("passive_health.failures", health.failures, PassiveHealth::MAX_FAILURES);
    let max_ejected_percent = small("passive_health.max_ejected_percent", health.max_ejected_percent, 100);
    // 0 means that nothing is said.
    let mut seconds = |field, it: u32, max| if it == 0 { None } else { number(field, it, max) };
    let slow_start =
        seconds("slow_start_seconds", message.slow_start_seconds, LoadBalancing::MAX_SLOW_START.into());
    LoadBalancing {
        algorithm,
        passive_health: PassiveHealth { enabled: health.enabled, failures, max_ejected_percent },
        slow_start: slow_start.and_then(|it| it.try_into().ok()),
        drain: seconds("drain_seconds", message.drain_seconds, LoadBalancing::MAX_DRAIN),
        udp_to_packets: message.udp_to_packets,
        external_forwarding: message.dsr.map(|it| match it {
            true => ExternalForwarding::Dsr,
            false => ExternalForwarding::Nat,
        }),
    }
}
