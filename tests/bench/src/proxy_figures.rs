//! The figures of proxies that are compared with each other.

use std::collections::BTreeMap;

use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};

use crate::plot::number;

/// The figures of proxies, by their names and the number of Services.
pub(crate) type ProxyFigures = BTreeMap<String, BTreeMap<u32, SizeFigures>>;

/// The figures of a proxy at a number of Services.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct SizeFigures {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) start: Option<Start>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) change: Option<Change>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) connect: Option<Connect>,
    /// Why something is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<String>,
}

/// A start, from exec until the first connect is served.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) cold_start_s: f64,
    /// The resident memory of all its processes then.
    pub(crate) rss_mb: f64,
    /// The CPU time until then.
    pub(crate) cpu_start_s: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Change {
    /// From the API server's event until the first connect sees it.
    pub(crate) visible_ms: Spread,
    pub(crate) cpu_ms_per_change: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) n: usize,
    pub(crate) min: f64,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) p99: Option<f64>,
    pub(crate) max: f64,
}

/// The time of connect() and close() of TCP sockets.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Connect {
    /// One Service every time, and its endpoint.
    pub(crate) tcp: Pair,
    /// A random Service, and a random endpoint.
    pub(crate) random: Pair,
}

/// Times of connects through a Service beside those straight to an endpoint, in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Pair {
    /// To an endpoint, by a socket outside of the cgroup that an eBPF proxy serves.
    pub(crate) bare: Quantiles,
    /// To the address of a Service.
    pub(crate) vip: Quantiles,
}

/// A distribution in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Quantiles {
    pub(crate) n: usize,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    /// The median, over the rounds, of the quotient of the medians.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) over_bare: Option<f64>,
}

/// Prints a row for each proxy and number of Services.
pub(crate) fn print(proxies: &ProxyFigures) {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "PROXY",
        "SERVICES",
        "CHANGE SEEN",
        "99 %",
        "AT MOST",
        "CPU",
        "START",
        "CPU",
        "RESIDENT",
        "DIRECT",
        "ONE SERVICE",
        "RANDOM",
    ]);
    for (name, sizes) in proxies {
        for (services, it) in sizes {
            let ms = |figure: Option<f64>| figure.map_or_else(String::new, |it| format!("{it:.1} ms"));
            let us = |figure: fn(&Connect) -> f64| {
                it.connect.as_ref().map_or_else(String::new, |it| format!("{:.1} µs", figure(it) / 1e3))
            };
            let start = |figure: fn(&Start) -> f64, unit, digits: usize| {
                it.start.as_ref().map_or_else(String::new, |it| format!("{:.digits$} {unit}", figure(it)))
            };
            table.add_row([
                name.clone(),
                number((*services).into()),
                it.failure.clone().unwrap_or_else(|| ms(it.change.map(|it| it.visible_ms.p50))),
                ms(it.change.and_then(|it| it.visible_ms.p99)),
                ms(it.change.map(|it| it.visible_ms.max)),
                ms(it.change.map(|it| it.cpu_ms_per_change)),
                start(|it| it.cold_start_s, "s", 2),
                start(|it| it.cpu_start_s, "s", 2),
                start(|it| it.rss_mb, "MB", 0),
                us(|it| it.tcp.bare.p50),
                us(|it| it.tcp.vip.p50),
                us(|it| it.random.vip.p50),
            ]);
        }
    }
    println!("{}", table.trim_fmt());
}
