//! The kernel's counters of each service port, except zeros.
//!
//! They grow with the number of Services, and so they are written Service by Service, and not by the library.

use std::{fmt::Write as _, iter, sync::Arc};

use datapath::PortCounts;
use model::state::Services;

use crate::counters::Reading;

/// A counter: its name without prefix and `_total`, its help text, and its value.
type Counter = (&'static str, &'static str, fn(&PortCounts) -> u64);

const COUNTERS: [Counter; 4] = [
    ("connections", "Connections and UDP associations that were redirected to an endpoint", |it| {
        it.connections
    }),
    (
        "no_backend",
        "Calls that found no endpoint of the Service: refused, or UDP left to the packet path",
        |it| it.no_backend,
    ),
    (
        "denied",
        "Binds to the node port that were denied, and without the packet path, datagrams without room for a NAT entry",
        |it| it.denied,
    ),
    ("left_to_packets", "Calls to a Service with endpoints that were left to the packet path", |it| {
        it.left_to_packets
    }),
];

/// The headers of each counter, and the samples of each Service.
pub(super) fn parts(
    prefix: &'static str,
    services: Services,
    reading: Arc<Reading>,
) -> impl Iterator<Item = String> + Send {
    COUNTERS.into_iter().flat_map(move |(name, help, value)| {
        let header = format!("# HELP {prefix}_{name}_total {help}.\n# TYPE {prefix}_{name}_total counter\n");
        let reading = Arc::clone(&reading);
        let samples = services.clone().into_values().map(move |it| {
            let mut lines = String::new();
            reading.each_port(&it, |port, counts| {
                let value = value(&counts);
                // Most nodes use few Services.
                if value != 0 {
                    // Neither names nor protocols have characters that would need an escape.
                    let (namespace, service) = (&port.service.namespace, &port.service.name);
                    let (port, protocol) = (port.port, port.protocol);
                    // Writing to a string cannot fail.
                    let _ = writeln!(
                        lines,
                        "{prefix}_{name}_total{{namespace=\"{namespace}\",service=\"{service}\",port=\"{port}\",\
                         protocol=\"{protocol}\"}} {value}"
                    );
                }
            });
            lines
        });
        iter::once(header).chain(samples)
    })
}
