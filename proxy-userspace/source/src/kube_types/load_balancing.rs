//! Converts the annotations of a Service that say how its connections are spread over its endpoints.
//!
//! Invariant: an invalid value is rejected and means the default; the Service is served.

use std::{
    collections::BTreeMap,
    num::{NonZeroU8, NonZeroU32},
};

use k8s_openapi::jiff::SignedDuration;
use model::{
    ServiceName,
    state::{Algorithm, ExternalForwarding, LoadBalancing, PassiveHealth},
};

use super::{
    objects::PREFIX,
    validation::{Validator, one_of, quoted, short, unknown_annotation},
};

const ALGORITHM: &str = "load-balancing";
const PASSIVE_HEALTH: &str = "passive-health";
const SLOW_START: &str = "slow-start";
const DRAIN: &str = "drain";
const UDP: &str = "udp";
const EXTERNAL_FORWARDING: &str = "external-forwarding";
/// The annotations that there are, without our prefix.
const KNOWN: [&str; 6] = [ALGORITHM, PASSIVE_HEALTH, SLOW_START, DRAIN, UDP, EXTERNAL_FORWARDING];
/// Those that a backend on the contract reads itself.
const OF_BACKENDS: [&str; 1] = ["ipvs-scheduler"];

/// The load balancing of a Service with these annotations, by their names without our prefix; an empty value means the
/// default.
pub(super) fn load_balancing(
    service: &ServiceName,
    annotations: &BTreeMap<String, String>,
    validator: &mut Validator,
) -> LoadBalancing {
    let mut reject = |name: &str, reason: String| {
        validator.ignore_annotation(service, format_args!("{PREFIX}{}", short(name)), reason);
    };
    let value = |name| annotations.get(name).map_or("", String::as_str);
    let algorithms = [("random", Algorithm::Random), ("least-connections", Algorithm::LeastConnections)];
    let paths = [("sockets", false), ("packets", true)];
    let found = LoadBalancing {
        algorithm: one_of(value(ALGORITHM), &algorithms, |reason| reject(ALGORITHM, reason)),
        passive_health: passive_health(value(PASSIVE_HEALTH), &mut reject),
        slow_start: seconds(SLOW_START, value(SLOW_START), LoadBalancing::MAX_SLOW_START.into(), &mut reject)
            .and_then(|it| it.try_into().ok()),
        drain: seconds(DRAIN, value(DRAIN), LoadBalancing::MAX_DRAIN, &mut reject),
        udp_to_packets: one_of(value(UDP), &paths, |reason| reject(UDP, reason)),
        external_forwarding: external_forwarding(value(EXTERNAL_FORWARDING), &mut reject),
    };
    let is_known = |it: &str| KNOWN.contains(&it) || OF_BACKENDS.contains(&it);
    for name in annotations.keys().filter(|it| !is_known(it)) {
        let all = format!("there are {PREFIX}{{{}}}", KNOWN.join(","));
        reject(name, unknown_annotation(name, &KNOWN, &all));
    }
    found
}

/// `on`, `off`, `failures=5` and `max-ejected=50%`, separated by commas; an invalid item rejects no other one.
fn passive_health(text: &str, reject: &mut impl FnMut(&str, String)) -> PassiveHealth {
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
            reject(PASSIVE_HEALTH, format!("{} is ignored; {remedy}", quoted(item)));
        }
    }
    found
}

const ITEMS: &str = "use on, off, failures=5 or max-ejected=50%";
const FAILURES: &str = "the default is used; use failures=1 to failures=50";
const MAX_EJECTED: &str = "the default is used; use max-ejected=1% to max-ejected=100%";

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

/// `nat` or `dsr`.
fn external_forwarding(text: &str, reject: &mut impl FnMut(&str, String)) -> Option<ExternalForwarding> {
    match text {
        "" => None,
        "nat" => Some(ExternalForwarding::Nat),
        "dsr" => Some(ExternalForwarding::Dsr),
        _ => {
            let reason =
                "is unknown, the value of the flag --external-forwarding is used; use one of nat, dsr";
            reject(EXTERNAL_FORWARDING, format!("{} {reason}", quoted(text)));
            None
        }
    }
}

/// A duration of whole seconds from 1 to `max`, in Go's notation.
fn seconds(name: &str, text: &str, max: u32, reject: &mut impl FnMut(&str, String)) -> Option<NonZeroU32> {
    if text.is_empty() {
        return None;
    }
    let duration: Option<SignedDuration> = text.parse().ok();
    let whole = duration.filter(|it| it.subsec_nanos() == 0).map(|it| it.as_secs());
    let seconds = whole.and_then(|it| u32::try_from(it).ok()).and_then(NonZeroU32::new);
    let valid = seconds.filter(|it| it.get() <= max);
    if valid.is_none() {
        let max = SignedDuration::from_secs(max.into());
        let reason = format!(
            "is not a duration of whole seconds from 1s to {max:#}, the default, none, is used; write it as 30s"
        );
        reject(name, format!("{} {reason}", quoted(text)));
    }
    valid
}
