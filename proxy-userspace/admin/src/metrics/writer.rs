//! Writes metrics that are read at each scrape, and has the help texts of all.

use std::fmt;

use model::Family;
use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

/// A label and its value.
pub(super) type Label = [(&'static str, &'static str); 1];

/// kube-proxy's label of the address family: it has a proxier for each family, of which each is synced alone, where here a
/// state is applied to both at once.
pub(super) fn ip_family(it: Family) -> Label {
    let name = match it {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    };
    [("ip_family", name)]
}

/// The label of each address family.
pub(super) fn by_family() -> impl Iterator<Item = Label> {
    Family::ALL.into_iter().map(ip_family)
}

/// The help text of each metric, behind its name, as they are served.
pub(super) const HELP: &str = include_str!("help.txt");

/// The help text of a metric; `name` with or without `_total`.
pub(super) fn help(name: &str) -> &'static str {
    let of = |line: &'static str| {
        let rest = line.strip_prefix(name)?;
        rest.strip_prefix("_total").unwrap_or(rest).strip_prefix(' ')
    };
    HELP.lines().find_map(of).unwrap_or_default()
}

/// Writes metrics whose names have a common prefix. The names of counters are without `_total`, which the encoder appends.
pub(crate) struct MetricWriter<'a, 'b> {
    pub(crate) prefix: &'static str,
    pub(crate) encoder: &'a mut DescriptorEncoder<'b>,
}

impl<'a, 'b> MetricWriter<'a, 'b> {
    /// Writes metrics of our own.
    pub(crate) fn own(encoder: &'a mut DescriptorEncoder<'b>) -> Self {
        Self { prefix: "kube_proxy_ebpf_", encoder }
    }

    pub(super) fn write(
        &mut self,
        name: &str,
        kind: MetricType,
        write: impl FnOnce(MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let name = format!("{}{name}", self.prefix);
        write(self.encoder.encode_descriptor(&name, help(&name), None, kind)?)
    }

    pub(super) fn gauge(&mut self, name: &str, value: f64) -> fmt::Result {
        self.write(name, MetricType::Gauge, |it| ConstGauge::new(value).encode(it))
    }

    pub(super) fn counter(&mut self, name: &str, value: f64) -> fmt::Result {
        self.write(name, MetricType::Counter, |it| ConstCounter::new(value).encode(it))
    }

    /// One counter for each value of a label.
    pub(crate) fn counters<'c>(
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
    pub(crate) fn gauges<'c>(
        &mut self,
        name: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'c str, f64)>,
    ) -> fmt::Result {
        let values = values.into_iter().map(|(value, number)| ([(label, value)], number));
        self.series(name, values)
    }

    /// One gauge for each set of labels.
    pub(super) fn series<'c, const N: usize>(
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
