//! The page `/metrics/slis`: the results of health checks, as components of Kubernetes report them
//! (`k8s.io/component-base/metrics/prometheus/slis`), counted whenever a health page is read.

use std::fmt;

use prometheus_client::{
    encoding,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::text;

type Labels<const N: usize> = [(&'static str, String); N];

#[derive(Debug)]
pub(crate) struct Slis {
    registry: Registry,
    last: Family<Labels<2>, Gauge>,
    all: Family<Labels<3>, Counter>,
}

impl Slis {
    pub(super) fn new() -> Self {
        let (last, all) = (Family::default(), Family::default());
        let mut registry = Registry::with_prefix("kubernetes");
        let help = "This metric records the result of a single healthcheck";
        registry.register("healthcheck", help, last.clone());
        registry.register("healthchecks", "This metric records the results of all healthcheck", all.clone());
        Self { registry, last, all }
    }

    /// Records the result of a check of `healthz` or `readyz`.
    pub(crate) fn observe(&self, page: &str, check: &str, is_ok: bool) {
        let (name, page) = (("name", check.to_owned()), ("type", page.to_owned()));
        let status = ("status", if is_ok { "success" } else { "error" }.to_owned());
        self.last.get_or_create(&[name.clone(), page.clone()]).set(is_ok.into());
        self.all.get_or_create(&[name, status, page]).inc();
    }

    pub(crate) fn text(&self) -> Result<String, fmt::Error> {
        let mut openmetrics = String::new();
        encoding::text::encode(&mut openmetrics, &self.registry)?;
        Ok(text::from_openmetrics(&openmetrics))
    }
}
