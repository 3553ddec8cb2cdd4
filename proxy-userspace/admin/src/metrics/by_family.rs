//! Metrics with kube-proxy's label of the address family.

use model::Family;
use prometheus_client::metrics::{counter::Counter, family, histogram::Histogram};

/// A label and its value.
pub(super) type Label = [(&'static str, &'static str); 1];

/// kube-proxy's label of the address family, and its values: it has a proxier for each family, of which each is synced alone,
/// where here a state is applied to both at once.
pub(super) const IP_FAMILY: &str = "ip_family";
pub(super) const FAMILIES: [(Family, &str); 2] = [(Family::V4, "IPv4"), (Family::V6, "IPv6")];

/// A histogram for each set of labels.
pub(super) type Histograms<L> = family::Family<L, Histogram, fn() -> Histogram>;

/// A histogram for each address family.
#[derive(Clone, Debug)]
pub(super) struct ByFamily(pub(super) Histograms<Label>);

impl ByFamily {
    /// With a series for each family from the start, as kube-proxy has after its first sync.
    pub(super) fn new(histogram: fn() -> Histogram) -> Self {
        let families = family::Family::new_with_constructor(histogram);
        for (_, name) in FAMILIES {
            drop(families.get_or_create(&[(IP_FAMILY, name)]));
        }
        Self(families)
    }

    pub(super) fn observe(&self, family: Family, seconds: f64) {
        let (_, name) = FAMILIES[usize::from(family == Family::V6)];
        self.0.get_or_create(&[(IP_FAMILY, name)]).observe(seconds);
    }

    pub(super) fn observe_both(&self, seconds: f64) {
        FAMILIES.iter().for_each(|(family, _)| self.observe(*family, seconds));
    }
}

/// A counter for each address family, from 0 on.
pub(super) fn counter_by_family() -> family::Family<Label, Counter> {
    let counter = family::Family::default();
    FAMILIES.iter().for_each(|(_, name)| drop(counter.get_or_create(&[(IP_FAMILY, *name)])));
    counter
}
