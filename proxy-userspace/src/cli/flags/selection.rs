//! Which Services are served.

use clap::Args;

/// Which Services are served.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct Selection {
    /// Serve only Services whose label service.kubernetes.io/service-proxy-name says this; without it, those that have
    /// no such label
    #[arg(long, value_name = "NAME", env = "KUBE_PROXY_EBPF_SERVICE_PROXY_NAME")]
    service_proxy_name: Option<String>,
    /// kube-proxy's feature gates that are known here: AllowServiceExternalIPs=false serves no external IPs (KEP-5707)
    #[arg(
        long,
        value_name = "NAME=BOOL,…",
        env = "KUBE_PROXY_EBPF_FEATURE_GATES",
        value_parser = feature_gates
    )]
    feature_gates: Vec<FeatureGates>,
}

/// What was said of kube-proxy's feature gates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FeatureGates {
    allow_service_external_ips: Option<bool>,
}

impl Selection {
    /// The same for the brain.
    pub(in crate::cli) fn options(&self) -> brain::Options {
        let mut options = brain::Options {
            // An environment variable that is there but empty says nothing.
            service_proxy_name: self.service_proxy_name.clone().filter(|it| !it.is_empty()),
            ..brain::Options::default()
        };
        // As with kube-proxy, the last word on a gate counts.
        if let Some(is_on) =
            self.feature_gates.iter().filter_map(|it| it.allow_service_external_ips).next_back()
        {
            options.external_ips = is_on;
        }
        options
    }
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
        match name {
            "AllowServiceExternalIPs" => gates.allow_service_external_ips = Some(is_on),
            _ => return Err(format!("{name:?} is not known here; AllowServiceExternalIPs is")),
        }
    }
    Ok(gates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(texts: &[&str], expect: Result<bool, &str>) {
        let gates: Result<Vec<_>, _> = texts.iter().map(|it| feature_gates(it)).collect();
        let options =
            gates.map(|feature_gates| Selection { service_proxy_name: None, feature_gates }.options());
        match (options, expect) {
            (Ok(options), Ok(expect)) => assert_eq!(options.external_ips, expect, "{texts:?}"),
            (Err(error), Err(expect)) => assert!(error.contains(expect), "{texts:?}: {error}"),
            (got, _) => panic!("{texts:?}: {got:?}"),
        }
    }

    #[test]
    fn external_ips_are_served_unless_the_feature_gate_says_no() {
        check(&[], Ok(true));
        check(&[""], Ok(true));
        check(&["AllowServiceExternalIPs=false"], Ok(false));
        check(&["AllowServiceExternalIPs=false", "AllowServiceExternalIPs=1"], Ok(true));
        check(&["AllowServiceExternalIPs=T,AllowServiceExternalIPs=False"], Ok(false));
        check(&["AllowServiceExternalIPs"], Err("NAME=true"));
        check(&["AllowServiceExternalIPs=no"], Err("\"no\""));
        check(&["Magic=true"], Err("\"Magic\" is not known here"));
    }
}
