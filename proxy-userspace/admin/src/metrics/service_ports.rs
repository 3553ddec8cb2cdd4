//! The kernel's counters of each service port, except zeros.
//!
//! They grow with the number of Services, and so they are written Service by Service, and not by the library.

use std::{fmt::Write as _, iter, sync::Arc};

use datapath::PortCounts;
use metrics::help;
use model::state::Services;

use crate::state::counters::Reading;

/// The headers of each counter, and the samples of each Service.
pub(super) fn parts(services: Services, reading: Arc<Reading>) -> impl Iterator<Item = String> + Send {
    PortCounts::COUNTERS.into_iter().flat_map(move |(name, values)| {
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
