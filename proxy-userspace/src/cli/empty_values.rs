//! Flags and variables with an empty value, as manifests have them that are made from a template.
//!
//! Invariant: only where kube-proxy takes an empty value for none. An empty path of a certificate is an error, not a connection
//! without TLS.

use std::{env, ffi::OsString};

use clap::Arg;

/// The flags of which an empty value counts as not given.
const OPTIONAL: [&str; 12] = [
    "bind-address",
    "cluster-cidr",
    "config",
    "detect-local-mode",
    "feature-gates",
    "hostname-override",
    "kube-api-server",
    "kubeconfig",
    "node-name",
    "nodeport-addresses",
    "pod-bridge-interface",
    "pod-interface-name-prefix",
];

fn is_optional(long: &str) -> bool {
    OPTIONAL.contains(&long)
}

/// The flag without its variable, if that is set but empty.
pub(super) fn without_empty_variable(flag: Arg) -> Arg {
    let is_empty = flag.get_env().and_then(env::var_os).is_some_and(|it| it.is_empty());
    if is_empty && flag.get_long().is_some_and(is_optional) { flag.env(None) } else { flag }
}

/// The words of a command line without the flags whose value is empty, as `--cluster-cidr=` or `--cluster-cidr ""`.
pub(super) fn without_empty(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let (mut words, mut given) = (words.into_iter().peekable(), Vec::new());
    while let Some(word) = words.next() {
        if word == "--" {
            given.push(word);
            break;
        }
        let long = word.to_str().and_then(|it| it.strip_prefix("--")).unwrap_or_default();
        let is_empty = long.strip_suffix('=').is_some_and(is_optional)
            || (is_optional(long) && words.next_if(|it| it.is_empty()).is_some());
        if !is_empty {
            given.push(word);
        }
    }
    given.extend(words);
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_value_counts_as_not_given_where_kube_proxy_takes_it_so() {
        let given = |words: &[&str]| without_empty(words.iter().map(Into::into)).join(" ".as_ref());
        assert_eq!(
            given(&["run", "--cluster-cidr=", "--node-name", "", "--bind-address", "1"]),
            "run --bind-address 1"
        );
        // Not the path of a certificate, nor an address that an empty value switches off.
        let others = ["--tls-ca=", "--cgroup", "", "--metrics-bind-address="];
        assert_eq!(given(&others), others.join(" ").as_str());
        // Nor what is another program's.
        assert_eq!(given(&["--lines", "--", "backend", "--node-name="]), "--lines -- backend --node-name=");
    }
}
