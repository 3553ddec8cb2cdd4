//! Which Services are served.

use clap::Args;

/// Which Services are served.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct SelectionFlags {
    /// Serve only Services with the label service.kubernetes.io/service-proxy-name=NAME [default: Services without it]
    #[arg(long, value_name = "NAME")]
    service_proxy_name: Option<String>,
    /// kube-proxy feature gates; only AllowServiceExternalIPs is supported (false: external IPs are not served, KEP-5707)
    #[arg(long, value_name = "NAME=BOOL,…", value_parser = feature_gates)]
    feature_gates: Vec<FeatureGates>,
}

/// kube-proxy's feature gates, as far as they are set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FeatureGates {
    allow_service_external_ips: Option<bool>,
}

impl SelectionFlags {
    /// The options of the brain.
    pub(in crate::cli) fn options(&self) -> brain::Options {
        let mut options = brain::Options {
            // An environment variable that is set but empty counts as not set.
            service_proxy_name: self.service_proxy_name.clone().filter(|it| !it.is_empty()),
            ..brain::Options::default()
        };
        // As with kube-proxy, the last value of a gate wins.
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
            _ => return Err(format!("{name:?} is not supported; only AllowServiceExternalIPs is")),
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
            gates.map(|feature_gates| SelectionFlags { service_proxy_name: None, feature_gates }.options());
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
        check(&["Magic=true"], Err("\"Magic\" is not supported"));
    }
}
