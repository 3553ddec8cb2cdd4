//! Converts the metadata of `v1 Pod`.
//!
//! Invariant: a pod without our annotation is of no interest, and takes no memory.

use model::{
    NameForm,
    state::{self, SocketLb},
};

use super::{
    conversion::{Converted, names_of, validator},
    objects::{self, PREFIX},
    validation::{Validator, one_of, short, unknown_annotation},
};

const SOCKET_LB: &str = "socket-lb";

pub(super) fn pod(it: &objects::Pod) -> Converted<state::Pod> {
    let metadata = &it.metadata;
    let Some(annotations) = metadata.annotations.as_ref().filter(|it| !it.ours.is_empty()) else {
        return Converted { object: None, rejected: Vec::new() };
    };
    let mut validator = validator("Pod", metadata);
    for name in annotations.ours.keys().filter(|it| *it != SOCKET_LB) {
        let only = format!("that of a Pod is {PREFIX}{SOCKET_LB}");
        report(&mut validator, name, unknown_annotation(name, &[SOCKET_LB], &only));
    }
    let text = annotations.ours.get(SOCKET_LB).map_or("", String::as_str);
    let words = [("on", None), ("off", Some(SocketLb::Off)), ("tcp-only", Some(SocketLb::TcpOnly))];
    let socket_lb = one_of(text, &words, |reason| report(&mut validator, SOCKET_LB, reason));
    let object = socket_lb.and_then(|socket_lb| {
        let (namespace, name) = names_of(metadata, NameForm::DnsSubdomain, &mut validator)?;
        // kubelet names the cgroup of a static pod by that of its manifest, which the API server's copy has as an annotation.
        let uid = annotations.config_mirror.as_ref().or(metadata.uid.as_ref()).map_or("", String::as_str);
        if uid.is_empty() {
            validator.reject("metadata.uid", "is missing; a pod's cgroup is found by it");
            return None;
        }
        Some(state::Pod { name: format!("{namespace}/{name}").into(), uid: uid.into(), socket_lb })
    });
    Converted { object, rejected: validator.into_rejected() }
}

fn report(validator: &mut Validator, name: &str, reason: String) {
    validator.report(format_args!("metadata.annotations[{PREFIX}{}]", short(name)), reason);
}
