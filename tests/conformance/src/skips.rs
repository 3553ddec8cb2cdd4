//! The list of upstream's tests that are left out.
//! The one rule: no entry without a reason, and none that cannot match.

use anyhow::{Context as _, Result, bail};
use regex::Regex;
use serde::Deserialize;

use crate::IpFamily;

/// Where the list is, from the root of the workspace.
pub(crate) const FILE: &str = "deploy/conformance/skip.yaml";

/// Some tests that are left out.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Skip {
    /// Matches a test's full name.
    #[serde(rename = "match")]
    pattern: String,
    /// For clusters of these families; all if there is none.
    #[serde(default)]
    families: Vec<String>,
    /// Why.
    reason: String,
}

/// Reads the list.
pub(crate) fn read(text: &str) -> Result<Vec<Skip>> {
    let skips: Vec<Skip> =
        serde_saphyr::from_str(text).with_context(|| format!("{FILE} is no list of skips"))?;
    for Skip { pattern, families, reason } in &skips {
        Regex::new(pattern).with_context(|| format!("{FILE}: {pattern:?}"))?;
        if pattern.trim().is_empty() {
            bail!("{FILE}: an empty `match` would leave out every test");
        }
        if reason.split_whitespace().count() < 3 {
            bail!("{FILE}: {pattern:?} needs a reason, not {reason:?}");
        }
        if let Some(family) =
            families.iter().find(|it| !IpFamily::ALL.iter().any(|known| known.name() == **it))
        {
            bail!("{FILE}: {pattern:?}: {family:?} is no family: use ipv4, ipv6 or dual");
        }
    }
    Ok(skips)
}

/// One regular expression for all that is left out in a cluster of these families.
pub(crate) fn expression(skips: &[Skip], family: IpFamily) -> String {
    let here =
        skips.iter().filter(|it| it.families.is_empty() || it.families.iter().any(|it| it == family.name()));
    here.map(|it| it.pattern.as_str()).collect::<Vec<_>>().join("|")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use build_tools::command::workspace;

    fn ours(family: IpFamily) -> Regex {
        let skips =
            read(&fs::read_to_string(workspace().join(FILE)).expect("the list")).expect("a good list");
        Regex::new(&expression(&skips, family)).expect("an expression")
    }

    #[track_caller]
    fn check(test: &str, skipped_for: &[&str]) {
        let families = IpFamily::ALL.iter().filter(|it| ours(**it).is_match(test));
        assert_eq!(families.map(|it| it.name()).collect::<Vec<_>>(), skipped_for, "{test}");
    }

    #[test]
    fn the_list_in_use_leaves_out_what_it_says() {
        const ALL: [&str; 3] = ["ipv4", "ipv6", "dual"];
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
            &["ipv4", "ipv6"],
        );
    }

    #[test]
    fn the_list_in_use_leaves_in_what_services_are_about() {
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
    fn refused(text: &str, expect: &str) {
        let error = format!("{:#}", read(text).expect_err("a bad list"));
        assert!(error.contains(expect), "{error}");
    }

    #[test]
    fn a_bad_entry_is_named() {
        refused("- {match: 'a(', reason: one two three}", "\"a(\"");
        refused("- {match: a, reason: ''}", "needs a reason");
        refused("- {match: '', reason: one two three}", "every test");
        refused("- {match: a, reason: one two three, families: [ipv5]}", "\"ipv5\" is no family");
        refused("- {match: a, why: one two three}", "why");
    }
}
