//! Which Services are served, and what becomes of packets to them from outside.

use brain::DEFAULT_MAX_NAMESPACE_ENTRIES;
use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use model::state::ExternalForwarding;

/// Which Services are served.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct SelectionFlags {
    /// Serve only Services with the label service.kubernetes.io/service-proxy-name=NAME [default: Services without it]
    #[arg(long, value_name = "NAME", value_parser = label_value)]
    service_proxy_name: Option<String>,
    /// kube-proxy feature gates; AllowServiceExternalIPs=false turns external IPs off (KEP-5707), others make no difference
    ///
    /// The log says of each other gate why it makes none.
    #[arg(long, value_name = "NAME=BOOL,…", value_parser = feature_gates)]
    feature_gates: Vec<FeatureGates>,
    /// Maximum number of entries of a namespace's Services; beyond it, the youngest Services are not served
    ///
    /// An entry is a frontend, or an endpoint at one of its ports. So no tenant takes the memory and the time of others.
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_MAX_NAMESPACE_ENTRIES, value_parser = clap::value_parser!(u64).range(1..))]
    max_namespace_entries: u64,
    #[command(flatten)]
    forwarding: ForwardingFlag,
}

/// What becomes of packets from outside.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ForwardingFlag {
    /// What becomes of packets from outside to external and load balancer IPs (experimental)
    ///
    /// nat translates them on the node that they enter by. dsr forwards those of the policy Cluster, of TCP and UDP, whole to
    /// a node with endpoints, which keeps the client's address and answers it directly. For dsr every node of the cluster
    /// must run this version, with the tc programs. A Service may say otherwise by the annotation
    /// kube-proxy-ebpf.io/external-forwarding.
    #[arg(long, value_name = "nat|dsr", default_value = "nat", value_parser = external_forwarding())]
    pub(in crate::cli) external_forwarding: ExternalForwarding,
}

/// kube-proxy's feature gates, as far as they are set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct FeatureGates {
    allow_service_external_ips: Option<bool>,
    /// What is said of the others.
    remarks: Vec<String>,
}

/// The gates that kube-proxy 1.28 to 1.36 looks at, and why each makes no difference here.
const WITHOUT_EFFECT: &str = include_str!("feature_gates.txt");

impl SelectionFlags {
    /// Logs the feature gates that make no difference.
    pub(super) fn log_remarks(&self) {
        for it in self.feature_gates.iter().flat_map(|it| &it.remarks) {
            tracing::info!("{it}");
        }
    }

    pub(in crate::cli) fn options(&self) -> brain::Options {
        let mut options = brain::Options {
            // An environment variable that is set but empty counts as not set.
            service_proxy_name: self.service_proxy_name.clone().filter(|it| !it.is_empty()),
            max_namespace_entries: self.max_namespace_entries,
            external_forwarding: self.forwarding.external_forwarding,
            ..brain::Options::default()
        };
        for gates in &self.feature_gates {
            // As with kube-proxy, the last value of a gate wins.
            options.external_ips = gates.allow_service_external_ips.unwrap_or(options.external_ips);
        }
        options
    }
}

fn external_forwarding() -> impl TypedValueParser<Value = ExternalForwarding> {
    PossibleValuesParser::new(["nat", "dsr"]).map(|it| match it.as_str() {
        "dsr" => ExternalForwarding::Dsr,
        _ => ExternalForwarding::Nat,
    })
}

/// The value of a label. No Service has another one.
fn label_value(text: &str) -> Result<String, String> {
    const MAX_LABEL_VALUE: usize = 63;
    let is_outer = |it: char| it.is_ascii_alphanumeric();
    let is_inner = |it: char| is_outer(it) || matches!(it, '-' | '_' | '.');
    let has_ends = text.is_empty() || text.starts_with(is_outer) && text.ends_with(is_outer);
    if text.len() > MAX_LABEL_VALUE || !text.chars().all(is_inner) || !has_ends {
        return Err(format!(
            "no label has this value: use at most {MAX_LABEL_VALUE} letters, digits, dashes, underscores and dots, with a \
             letter or digit at both ends"
        ));
    }
    Ok(text.into())
}

fn feature_gates(text: &str) -> Result<FeatureGates, String> {
    let mut gates = FeatureGates::default();
    for gate in text.split(',').filter(|it| !it.is_empty()) {
        let (name, value) = gate.split_once('=').ok_or("write it as NAME=true or NAME=false")?;
        let is_on = match value {
            "1" | "t" | "T" | "true" | "True" | "TRUE" => true,
            "0" | "f" | "F" | "false" | "False" | "FALSE" => false,
            _ => return Err(format!("{value:?} is neither true nor false")),
        };
        let reason = WITHOUT_EFFECT.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(": "));
        let remark = match reason {
            _ if name == "AllowServiceExternalIPs" => {
                gates.allow_service_external_ips = Some(is_on);
                continue;
            }
            Some(reason) => format!("the feature gate {name}={is_on} makes no difference: {reason}"),
            // Of another version of Kubernetes, or of another component, as clusters set them for all at once.
            None => format!("the feature gate {name:?} is unknown and ignored; is it misspelled?"),
        };
        gates.remarks.push(remark);
    }
    Ok(gates)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tests::parse_flags;

    #[test]
    fn external_ips_are_served_unless_the_feature_gate_says_no() {
        let served = |gates: &[&str]| {
            let words: Vec<_> = gates.iter().map(|it| format!("--feature-gates={it}")).collect();
            parse_flags::<SelectionFlags>(&words).map(|it| it.options().external_ips)
        };
        for (gates, expect) in [
            (&[][..], true),
            (&[""], true),
            (&["AllowServiceExternalIPs=false"], false),
            (&["AllowServiceExternalIPs=false", "AllowServiceExternalIPs=1"], true),
            (&["AllowServiceExternalIPs=T,AllowServiceExternalIPs=False"], false),
            (&["AllowServiceExternalIPs=false", "NFTablesProxyMode=true"], false),
        ] {
            assert_eq!(served(gates).unwrap(), expect, "{gates:?}");
        }
        for (gate, expect) in
            [("AllowServiceExternalIPs", "NAME=true"), ("AllowServiceExternalIPs=no", "\"no\"")]
        {
            let error = served(&[gate]).unwrap_err().to_string();
            assert!(error.contains(expect), "{gate}: {error}");
        }
    }

    #[test]
    fn a_service_proxy_name_is_the_value_of_a_label() {
        for it in ["", "a", "kube-proxy-ebpf", "A_b.c-9", &"a".repeat(63)] {
            assert_eq!(label_value(it).as_deref(), Ok(it));
        }
        for it in ["-a", "a.", "a b", "a/b", "ä", &"a".repeat(64)] {
            assert!(label_value(it).unwrap_err().contains("at most 63"), "{it:?}");
        }
    }

    #[test]
    fn other_feature_gates_are_accepted_with_a_remark() {
        let remarks = |text: &str| feature_gates(text).unwrap().remarks;
        assert_eq!(remarks("AllowServiceExternalIPs=true"), [""; 0]);
        assert_eq!(
            remarks("NFTablesProxyMode=true,TopologyAwareHints=0"),
            [
                "the feature gate NFTablesProxyMode=true makes no difference: --backend chooses between eBPF and nftables",
                "the feature gate TopologyAwareHints=false makes no difference: hints are always followed",
            ]
        );
        assert_eq!(
            remarks("Magic\n=true"),
            ["the feature gate \"Magic\\n\" is unknown and ignored; is it misspelled?"]
        );
        for (name, reason) in WITHOUT_EFFECT.lines().filter_map(|it| it.split_once(": ")) {
            assert!(remarks(&format!("{name}=true"))[0].ends_with(reason), "{name}");
        }
    }
}
