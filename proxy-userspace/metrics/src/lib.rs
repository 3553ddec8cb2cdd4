//! How each part of the process registers what it measures: counters and histograms by [`add`], and what is read at each scrape
//! by a [collector](prometheus_client::collector::Collector) with a [`MetricWriter`].
//!
//! Invariant: the part that measures names the metric; its help text is in the one table.

#![forbid(unsafe_code)]

use std::{fmt, hash::Hash};

use model::Family as IpFamily;
use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder},
    metrics::{
        MetricType,
        counter::ConstCounter,
        family::{Family, MetricConstructor},
        gauge::ConstGauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Metric, Registry},
};

/// Registers a metric; `name` without `_total`.
pub fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, metric: M) -> M {
    // The library appends the full stop.
    registry.register(name, help(name).trim_end_matches('.'), metric.clone());
    metric
}

pub type Label = [(&'static str, &'static str); 1];

/// kube-proxy's label of the address family: it has a proxier for each family, of which each is synced alone, where here a
/// state is applied to both at once.
pub fn ip_family(it: IpFamily) -> Label {
    let name = match it {
        IpFamily::V4 => "IPv4",
        IpFamily::V6 => "IPv6",
    };
    [("ip_family", name)]
}

pub fn by_family() -> impl Iterator<Item = Label> {
    IpFamily::ALL.into_iter().map(ip_family)
}

/// A metric with a series for each of these labels from the start, as kube-proxy has after its first sync.
pub fn with_series<M: Clone, C: MetricConstructor<M>>(
    metric: Family<Label, M, C>,
    labels: impl IntoIterator<Item = Label>,
) -> Family<Label, M, C> {
    labels.into_iter().for_each(|it| drop(metric.get_or_create(&it)));
    metric
}

pub type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

pub fn histograms<L: Clone + Hash + Eq>(make: fn() -> Histogram) -> Histograms<L> {
    Family::new_with_constructor(make)
}

/// How long syncs take, by address family: 1 ms to 16 s, as in kube-proxy.
pub fn sync_durations() -> Histograms<Label> {
    with_series(histograms(|| Histogram::new(exponential_buckets(0.001, 2.0, 15))), by_family())
}

/// The help text of each metric, behind its name, as they are served.
pub const HELP: &str = include_str!("help.txt");

/// The help text of a metric; `name` with or without `_total`.
pub fn help(name: &str) -> &'static str {
    let of = |line: &'static str| {
        let rest = line.strip_prefix(name)?;
        rest.strip_prefix("_total").unwrap_or(rest).strip_prefix(' ')
    };
    HELP.lines().find_map(of).unwrap_or_default()
}

/// Writes metrics whose names have a common prefix. The names of counters are without `_total`, which the encoder appends.
pub struct MetricWriter<'a, 'b> {
    pub prefix: &'static str,
    pub encoder: &'a mut DescriptorEncoder<'b>,
}

impl<'a, 'b> MetricWriter<'a, 'b> {
    /// Writes metrics of our own.
    pub fn own(encoder: &'a mut DescriptorEncoder<'b>) -> Self {
        Self { prefix: "kube_proxy_ebpf_", encoder }
    }

    fn write(
        &mut self,
        name: &str,
        kind: MetricType,
        write: impl FnOnce(MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let name = format!("{}{name}", self.prefix);
        write(self.encoder.encode_descriptor(&name, help(&name), None, kind)?)
    }

    pub fn gauge(&mut self, name: &str, value: f64) -> fmt::Result {
        self.write(name, MetricType::Gauge, |it| ConstGauge::new(value).encode(it))
    }

    pub fn counter(&mut self, name: &str, value: f64) -> fmt::Result {
        self.write(name, MetricType::Counter, |it| ConstCounter::new(value).encode(it))
    }

    /// One counter for each value of a label.
    pub fn counters<'c>(
        &mut self,
        name: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'c str, u64)>,
    ) -> fmt::Result {
        self.write(name, MetricType::Counter, |mut family| {
            values.into_iter().try_for_each(|(value, number)| {
                ConstCounter::new(number).encode(family.encode_family(&[(label, value)])?)
            })
        })
    }

    /// One gauge for each value of a label.
    pub fn gauges<'c>(
        &mut self,
        name: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'c str, f64)>,
    ) -> fmt::Result {
        let values = values.into_iter().map(|(value, number)| ([(label, value)], number));
        self.series(name, values)
    }

    /// One gauge for each set of labels.
    pub fn series<'c, const N: usize>(
        &mut self,
        name: &str,
        values: impl IntoIterator<Item = ([(&'static str, &'c str); N], f64)>,
    ) -> fmt::Result {
        self.write(name, MetricType::Gauge, |mut family| {
            values.into_iter().try_for_each(|(labels, number)| {
                ConstGauge::new(number).encode(family.encode_family(&labels)?)
            })
        })
    }
}
