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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_result_is_counted_and_the_last_one_is_a_gauge() {
        let slis = Slis::new();
        for is_ok in [true, true, false] {
            slis.observe("readyz", "programs", is_ok);
        }
        let text = slis.text().unwrap();
        for line in [
            "# TYPE kubernetes_healthcheck gauge",
            r#"kubernetes_healthcheck{name="programs",type="readyz"} 0"#,
            "# TYPE kubernetes_healthchecks_total counter",
            r#"kubernetes_healthchecks_total{name="programs",status="success",type="readyz"} 2"#,
            r#"kubernetes_healthchecks_total{name="programs",status="error",type="readyz"} 1"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in {text}");
        }
    }
}
