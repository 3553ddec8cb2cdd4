//! Packets to cluster IPs that no Service has, which would leave by the default route.
//!
//! Invariant: a packet to a Service never gets here. One to a Service's cluster IP was translated or refused before.

use ipnet::IpNet;
use model::Family;

use crate::encode::{
    chain::{Chain, Hook},
    expressions::Rule,
    verdict::Verdict,
};

/// The chains that drop new connections to addresses in these ranges, like kube-proxy's `cluster-ips-check`.
pub(crate) fn chains(family: Family, service_cidrs: &[IpNet]) -> Vec<Chain> {
    if service_cidrs.is_empty() {
        return Vec::new();
    }
    let drop = |net: &IpNet| {
        let rule = Rule::new(family, "a cluster IP that no Service has");
        // An address of the host itself is reached by this interface.
        rule.if_outgoing_interface_is_not("lo").if_to(*net).if_new().verdict(&Verdict::Drop)
    };
    let rules: Vec<_> = service_cidrs.iter().map(drop).collect();
    let chain = |name, hook| Chain::base(name, hook, rules.clone());
    vec![chain("unassigned-forward", Hook::Forward), chain("unassigned-output", Hook::OutputFilter)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{
        config::{Config, Host},
        rules::TableConfig,
    };

    #[test]
    fn there_are_chains_for_the_ranges_of_the_family_only() {
        let count = |family, ranges: &[&str]| {
            let service_cidrs = ranges.iter().map(|it| it.parse().expect("a range")).collect();
            let host = Host { service_cidrs, ..Host::default() };
            let chains = TableConfig::new(family, &Config::default(), &host).chains();
            let own = chains.iter().filter(|it| it.name.starts_with("unassigned-"));
            own.map(|it| it.rules.len()).collect::<Vec<_>>()
        };
        assert_eq!(count(Family::V4, &[]), [0; 0]);
        assert_eq!(count(Family::V6, &["10.96.0.0/16"]), [0; 0]);
        assert_eq!(count(Family::V4, &["10.96.0.0/16", "10.98.0.0/16", "fd00:96::/112"]), [2, 2]);
        // Overlapping ranges are one.
        assert_eq!(count(Family::V4, &["10.96.0.0/16", "10.96.0.0/24"]), [1, 1]);
    }
}
