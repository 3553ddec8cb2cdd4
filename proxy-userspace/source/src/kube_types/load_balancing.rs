//! Converts the annotations of a Service that say how its connections are spread over its endpoints.
//!
//! Invariant: an invalid value is rejected and means the default; the Service is served.

use std::num::{NonZeroU8, NonZeroU32};

use k8s_openapi::jiff::SignedDuration;
use model::state::{Algorithm, LoadBalancing, PassiveHealth};

use super::{
    objects::Annotations,
    validation::{Validator, quoted},
};

const ALGORITHM: &str = "metadata.annotations[kube-proxy-ebpf.io/load-balancing]";
const PASSIVE_HEALTH: &str = "metadata.annotations[kube-proxy-ebpf.io/passive-health]";
const SLOW_START: &str = "metadata.annotations[kube-proxy-ebpf.io/slow-start]";
const DRAIN: &str = "metadata.annotations[kube-proxy-ebpf.io/drain]";

const ALGORITHMS: &[(&str, Algorithm)] =
    &[("random", Algorithm::Random), ("least-connections", Algorithm::LeastConnections)];

/// The load balancing of a Service with these annotations; an empty value means the default.
pub(super) fn load_balancing(annotations: &Annotations, validator: &mut Validator) -> LoadBalancing {
    let slow_start = annotations.slow_start.as_deref();
    let slow_start = seconds(SLOW_START, slow_start, LoadBalancing::MAX_SLOW_START.into(), validator);
    LoadBalancing {
        algorithm: validator.one_of(ALGORITHM, annotations.load_balancing.as_deref(), ALGORITHMS),
        passive_health: passive_health(annotations.passive_health.as_deref().unwrap_or(""), validator),
        slow_start: slow_start.and_then(|it| it.try_into().ok()),
        drain: seconds(DRAIN, annotations.drain.as_deref(), LoadBalancing::MAX_DRAIN, validator),
    }
}

/// `on`, `off`, `failures=5` and `max-ejected=50%`, separated by commas; an invalid item rejects no other one.
fn passive_health(text: &str, validator: &mut Validator) -> PassiveHealth {
    let mut found = PassiveHealth::default();
    for item in text.split(',').map(str::trim).filter(|it| !it.is_empty()) {
        let outcome = match item.split_once('=') {
            None if matches!(item, "on" | "off") => set(&mut found.enabled, Some(item == "on"), ITEMS),
            Some(("failures", it)) => {
                set(&mut found.failures, number(it, PassiveHealth::MAX_FAILURES), FAILURES)
            }
            Some(("max-ejected", it)) => {
                let percent = it.strip_suffix('%').and_then(|it| number(it, 100));
                set(&mut found.max_ejected_percent, percent, MAX_EJECTED)
            }
            _ => Err(ITEMS),
        };
        if let Err(remedy) = outcome {
            validator.reject(PASSIVE_HEALTH, format!("{} is ignored; {remedy}", quoted(item)));
        }
    }
    found
}

const ITEMS: &str = "use on, off, failures=5 or max-ejected=50%";
const FAILURES: &str = "use failures=1 to failures=50";
const MAX_EJECTED: &str = "use max-ejected=1% to max-ejected=100%";

/// Sets a field for the first time; `remedy` is the error if there is no value.
fn set<T>(field: &mut Option<T>, value: Option<T>, remedy: &'static str) -> Result<(), &'static str> {
    let value = value.ok_or(remedy)?;
    if field.is_some() {
        return Err("an earlier item sets the same; keep one");
    }
    *field = Some(value);
    Ok(())
}

/// A number from 1 to `max`.
fn number(text: &str, max: u8) -> Option<NonZeroU8> {
    text.parse().ok().filter(|it: &NonZeroU8| it.get() <= max)
}

/// A duration of whole seconds from 1 to `max`, in Go's notation.
fn seconds(field: &str, text: Option<&str>, max: u32, validator: &mut Validator) -> Option<NonZeroU32> {
    let text = text.filter(|it| !it.is_empty())?;
    let duration: Option<SignedDuration> = text.parse().ok();
    let whole = duration.filter(|it| it.subsec_nanos() == 0).map(|it| it.as_secs());
    let seconds = whole.and_then(|it| u32::try_from(it).ok()).and_then(NonZeroU32::new);
    let valid = seconds.filter(|it| it.get() <= max);
    if valid.is_none() {
        let max = SignedDuration::from_secs(max.into());
        let reason =
            format!("is not a duration of whole seconds from 1s to {max:#}, and is ignored; write it as 30s");
        validator.reject(field, format!("{} {reason}", quoted(text)));
    }
    valid
}
