//! Clients that keep an endpoint: who must let go of it, because it is gone.
//!
//! The one rule: the kernel alone writes who keeps what; here it is only taken away.

use std::{collections::BTreeSet, net::IpAddr};

use model::Family;
use nix::errno::Errno;

use super::{
    compile::{PortImage, set_number, unspecified},
    elements::{Element, Elements, Value},
    error::Error,
    layout::{Changed, Layout},
    schema::{Map, Parts},
    snapshot::{self, read_elements},
    tables::{Command, elements},
    transaction::forget,
};
use crate::netlink::Netfilter;

/// How often to look for more; a packet that is just being translated may note what was just forgotten.
const ATTEMPTS: usize = 10;

/// Whether somebody may keep an endpoint that is gone.
pub(super) fn may_be_stale(changed: &Changed) -> bool {
    let now = |port: &PortImage| changed.after.ports.iter().find(|it| it.identity == port.identity);
    changed.before.ports.iter().filter(|it| it.affinity > 0).any(|before| {
        let Some(after) = now(before) else { return true };
        after.affinity == 0
            || before.frontends.iter().any(|it| !after.frontends.iter().any(|now| now.address == it.address))
            || before.sets.iter().any(|(scope, endpoints)| {
                let same = after.sets.iter().find(|(it, _)| it == scope);
                same.is_none_or(|(_, now)| endpoints.iter().any(|it| now.binary_search(it).is_err()))
            })
    })
}

/// Lets every client go whose endpoint is gone.
pub(super) fn forget_stale(
    netfilter: &mut Netfilter,
    layout: &Layout,
    families: &[Family],
    own: &BTreeSet<IpAddr>,
) -> Result<(), Error> {
    for _ in 0..ATTEMPTS {
        let mut messages = Vec::new();
        for &family in families {
            for (map, set) in Map::AFFINITY.into_iter().zip(0..) {
                let kept = read(netfilter, family, map)?;
                for (element, value) in &kept {
                    if !is_right(layout, set, own, element, value) {
                        messages.extend(elements(Command::DeleteElements, family, map, [(element, value)]));
                    }
                }
            }
        }
        if messages.is_empty() {
            return Ok(());
        }
        forget(netfilter, &messages)?;
    }
    Ok(())
}

fn read(netfilter: &mut Netfilter, family: Family, map: Map) -> Result<Elements, Error> {
    let mut kept = Elements::new();
    match read_elements(netfilter, family, map, &mut kept) {
        // Clients come and go; what was seen was seen.
        Ok(()) | Err(Errno::EINTR) => Ok(kept),
        Err(errno) => Err(Error::Read { what: "clients", errno }),
    }
}

/// Whether a client may keep its endpoint.
fn is_right(layout: &Layout, set: u32, own: &BTreeSet<IpAddr>, element: &Element, value: &Value) -> bool {
    let mut key = Parts::of(&element.key, element.family);
    let (Some(frontend), Value::Data(value)) = (snapshot::frontend(&mut key), value) else { return false };
    let Some(endpoint) = snapshot::endpoint(value, element.family) else { return false };
    let node_port = || {
        let mut any = frontend;
        any.address.set_ip(unspecified(element.family));
        own.contains(&frontend.address.ip()).then(|| layout.owner(&any)).flatten()
    };
    layout.owner(&frontend).or_else(node_port).is_some_and(|(_, port)| {
        let endpoints = port.sets.iter().find(|(scope, _)| set_number(*scope) == set);
        port.affinity > 0 && endpoints.is_some_and(|(_, it)| it.binary_search(&endpoint).is_ok())
    })
}
