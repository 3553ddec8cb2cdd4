//! The state of one Service: its frontends and the endpoints that the node may use.

use std::sync::Arc;

use model::{
    Family, PerFamily, Protocol, Timestamp,
    cluster::{EndpointSlice, Service},
    conflicts::remove_conflicting,
    state::{PortTarget, ServiceState},
};

use crate::{
    NodeView, Options,
    admission::Admitted,
    candidates::{Candidate, SlicesByPort, candidates, is_serving},
    endpoints::SelectedEndpoints,
    forwarding::{forwarded_port, is_forwarded},
    frontends::{frontends, has_family},
    select::{Others, Selection, select},
};

/// The state of one Service on one node, from its slices and without the frontends that another Service owns; none if it is not
/// served. `others` are the endpoints that are in none of the slices.
///
/// The order of the slices, and within the slices, does not matter.
pub(crate) fn service_state<'a>(
    service: &Service,
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    node: NodeView<'_>,
    options: &Options,
    admitted: Admitted<'_>,
    others: PerFamily<Others>,
) -> Option<ServiceState> {
    let mut state = frontends(service, options)?;
    if let Some(conflicting) = admitted.conflicting {
        remove_conflicting(&mut state, conflicting);
    }
    let slices: Vec<_> = slices.into_iter().filter(|slice| !slice.headless).collect();

    let by_port = SlicesByPort::new(&slices);
    let mut selected = SelectedEndpoints::default();
    let (mut other_serving, mut not_serving) = (Vec::new(), Vec::new());
    let is_forwarded = is_forwarded(service, options) && !admitted.is_translated;
    let mut forwarded = Vec::new();
    // TCP connections continue in any case, unless the Service drains.
    let drains = service.load_balancing.drain.is_some();
    for (index, port) in service.ports.iter().enumerate() {
        let Ok(index) = u16::try_from(index) else { break };
        for family in Family::ALL.into_iter().filter(|it| has_family(service, *it)) {
            let position = usize::from(index);
            let (candidates, selection) =
                select_for(service, &state, &by_port, position, *others.of(family), (family, node));
            *state.ports[position].has_any_endpoint.of_mut(family) = selection.has_any_endpoint;
            if is_forwarded {
                let port = forwarded_port(&state, index, (family, node), &candidates, &selection);
                forwarded.extend(port.ok());
            }
            for (candidate, number) in candidates.iter().zip(0..) {
                let scopes = selection.scopes(number);
                if !scopes.is_empty() {
                    selected.add(candidate, index, scopes, node);
                    continue;
                }
                let target = PortTarget { index, target: candidate.target() };
                match is_serving(candidate.endpoint) {
                    true if drains || port.protocol != Protocol::Tcp => other_serving.push(target),
                    false if port.protocol == Protocol::Udp => not_serving.push(target),
                    _ => {}
                }
            }
        }
    }
    other_serving.sort_unstable();
    not_serving.sort_unstable();
    Some(ServiceState {
        other_serving: other_serving.into(),
        not_serving: not_serving.into(),
        forwarded: if forwarded.is_empty() { Arc::default() } else { forwarded.into() },
        trigger_time: trigger_time(&slices),
        ..ServiceState::new(state, selected.assemble())
    })
}

/// The candidates of the port at a position in one family, and which of them are selected. `state` is the Service without
/// the frontends that another one owns.
pub(crate) fn select_for<'a>(
    service: &Service,
    state: &Service,
    slices: &SlicesByPort<'a>,
    port: usize,
    others: Others,
    (family, node): (Family, NodeView<'_>),
) -> (Vec<Candidate<'a>>, Selection) {
    let candidates = candidates(slices, &service.ports[port], family);
    let is_external = state.is_external(&state.ports[port], family);
    let selection = select(&candidates, service, is_external, node, others);
    (candidates, selection)
}

pub(crate) fn trigger_time(slices: &[&EndpointSlice]) -> Option<Timestamp> {
    slices.iter().filter(|it| !it.headless).filter_map(|it| it.trigger_time).max()
}
