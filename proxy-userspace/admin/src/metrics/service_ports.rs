//! The kernel's counters of each service port, except zeros.
//!
//! They grow with the number of Services, and so they are written Service by Service, and not by the library.

use std::{fmt::Write as _, iter, sync::Arc};

use datapath::PortCounts;
use metrics::help;
use model::state::Services;

use crate::state::counters::Reading;

/// A value of a counter, with its label `way`; empty if the counter has no such label.
type Value = (&'static str, fn(&PortCounts) -> u64);

/// The counters: their names and values.
const COUNTERS: [(&str, &[Value]); 7] = [
    ("kube_proxy_ebpf_connections_total", &[("", |it| it.connections)]),
    ("kube_proxy_ebpf_no_backend_total", &[("", |it| it.no_backend)]),
    ("kube_proxy_ebpf_denied_total", &[("", |it| it.denied)]),
    ("kube_proxy_ebpf_left_to_packets_total", &[("", |it| it.left_to_packets)]),
    ("kube_proxy_ebpf_external_connections_total", &[("", |it| it.external_connections)]),
    (
        "kube_proxy_ebpf_external_packets_total",
        &[
            ("sent", |it| it.forwarding.sent.packets),
            ("served", |it| it.forwarding.served.packets),
            ("received", |it| it.forwarding.received.packets),
            ("second", |it| it.forwarding.second_chances),
            ("dropped", |it| it.forwarding.dropped),
        ],
    ),
    (
        "kube_proxy_ebpf_external_bytes_total",
        &[
            ("sent", |it| it.forwarding.sent.bytes),
            ("served", |it| it.forwarding.served.bytes),
            ("received", |it| it.forwarding.received.bytes),
        ],
    ),
];

/// The headers of each counter, and the samples of each Service.
pub(super) fn parts(services: Services, reading: Arc<Reading>) -> impl Iterator<Item = String> + Send {
    COUNTERS.into_iter().flat_map(move |(name, values)| {
        let header = format!("# HELP {name} {}\n# TYPE {name} counter\n", help(name));
        let reading = Arc::clone(&reading);
        let samples = services.clone().into_values().map(move |it| {
            let mut lines = String::new();
            reading.each_port(&it, |port, counts| {
                let values = values.iter().map(|(way, value)| (*way, value(&counts)));
                // Most nodes use few Services.
                for (way, value) in values.filter(|(_, value)| *value != 0) {
                    let way = if way.is_empty() { String::new() } else { format!(",way=\"{way}\"") };
                    // Neither names nor protocols have characters that would need an escape.
                    let (namespace, service) = (&port.service.namespace, &port.service.name);
                    let (port, protocol) = (port.port, port.protocol);
                    // Writing to a string cannot fail.
                    let _ = writeln!(
                        lines,
                        "{name}{{namespace=\"{namespace}\",service=\"{service}\",port=\"{port}\",\
                         protocol=\"{protocol}\"{way}}} {value}"
                    );
                }
            });
            lines
        });
        iter::once(header).chain(samples)
    })
}
