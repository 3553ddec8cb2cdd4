//! The list of skipped tests.
//! Invariant: every entry has a reason and a pattern that can match.

use anyhow::{Context as _, Result, bail};
use regex::Regex;
use serde::Deserialize;

use crate::options::IpFamily;

pub(crate) const FILE: &str = "deploy/conformance/skip.yaml";

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Skip {
    /// Matches a test's full name.
    #[serde(rename = "match")]
    pattern: String,
    /// In clusters of these families; empty for all.
    #[serde(default)]
    families: Vec<IpFamily>,
    reason: String,
}

pub(crate) fn parse(text: &str) -> Result<Vec<Skip>> {
    let skips: Vec<Skip> =
        serde_saphyr::from_str(text).with_context(|| format!("{FILE} is not a list of skips"))?;
    for Skip { pattern, reason, .. } in &skips {
        Regex::new(pattern).with_context(|| format!("{FILE}: {pattern:?}"))?;
        if pattern.trim().is_empty() {
            bail!("{FILE}: an empty `match` would skip every test");
        }
        if reason.split_whitespace().count() < 3 {
            bail!("{FILE}: {pattern:?} needs a reason, not {reason:?}");
        }
    }
    Ok(skips)
}

/// One regular expression for all tests that are skipped in a cluster of these families.
pub(crate) fn expression(skips: &[Skip], family: IpFamily) -> String {
    let here = skips.iter().filter(|it| it.families.is_empty() || it.families.contains(&family));
    here.map(|it| it.pattern.as_str()).collect::<Vec<_>>().join("|")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use build_tools::command::workspace;

    use super::*;
    use crate::options::IpFamily::{Dual, Ipv4, Ipv6};

    fn skip_list(family: IpFamily) -> Regex {
        let skips =
            parse(&fs::read_to_string(workspace().join(FILE)).expect("the list")).expect("a good list");
        Regex::new(&expression(&skips, family)).expect("an expression")
    }

    #[track_caller]
    fn check(test: &str, skipped_for: &[IpFamily]) {
        let families = [Ipv4, Ipv6, Dual].into_iter().filter(|it| skip_list(*it).is_match(test));
        assert_eq!(families.collect::<Vec<_>>(), skipped_for, "{test}");
    }

    #[test]
    fn the_list_skips_what_it_says() {
        const ALL: [IpFamily; 3] = [Ipv4, Ipv6, Dual];
        check("[sig-network] KubeProxy should set TCP CLOSE_WAIT timeout [Privileged]", &ALL);
        check(
            "[sig-network] Networking should recreate its iptables rules if they are deleted [Disruptive]",
            &ALL,
        );
        check(
            "[sig-network] Networking Granular Checks: Services should function for pod-Service: sctp \
             [Feature:SCTPConnectivity]",
            &ALL,
        );
        check(
            "[sig-network] [Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly] should \
             function for pod-Service: http",
            &[Ipv4, Ipv6],
        );
    }

    #[test]
    fn the_list_keeps_the_tests_of_services() {
        for test in [
            "[sig-network] Services should serve a basic endpoint from pods [Conformance]",
            "[sig-network] Services should be rejected when no endpoints exist",
            "[sig-network] Services should have session affinity work for NodePort service [LinuxOnly] [Conformance]",
            "[sig-network] Services should implement service.kubernetes.io/service-proxy-name",
            "[sig-network] Networking should check kube-proxy urls",
            "[sig-network] Networking Granular Checks: Services should function for node-Service: udp",
            "[sig-network] Ingress API should support creating Ingress API operations [Conformance]",
            "[sig-network] Conntrack should be able to preserve UDP traffic when server pod cycles for a ClusterIP service",
            "[sig-scheduling] SchedulerPreemption [Serial] validates basic preemption works [Conformance]",
        ] {
            check(test, &[]);
        }
    }

    #[track_caller]
    fn rejects(text: &str, expect: &str) {
        let error = format!("{:#}", parse(text).expect_err("a bad list"));
        assert!(error.contains(expect), "{error}");
    }

    #[test]
    fn an_invalid_entry_is_named() {
        rejects("- {match: 'a(', reason: one two three}", "\"a(\"");
        rejects("- {match: a, reason: ''}", "needs a reason");
        rejects("- {match: '', reason: one two three}", "every test");
        rejects("- {match: a, reason: one two three, families: [ipv5]}", "ipv5");
        rejects("- {match: a, why: one two three}", "why");
    }
}
