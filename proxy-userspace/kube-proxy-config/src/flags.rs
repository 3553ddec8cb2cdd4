//! The flags of kube-proxy 1.36 on Linux (`AddFlags` in its `cmd/kube-proxy/app/options.go`, and those of its logs), without
//! those that klog keeps for programs of old.
//!
//! Invariant: a flag that `run` does not take has a reason, in words for users who have set it.

use crate::FIELDS;

#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// The long name.
    pub name: &'static str,
    /// Why `run` does not take it; `None` if it does.
    pub reason: Option<&'static str>,
}

/// Why a command does not take a flag of kube-proxy; `None` if kube-proxy has no such flag, or the command needs it.
pub fn reason(name: &str) -> Option<&'static str> {
    let flag = FLAGS.iter().find(|it| it.name == name)?;
    // A command without the flag does not need the field of the file either.
    let id = name.replace('-', "_");
    let of_field = || Some(FIELDS.iter().find(|it| it.flag == Some(&*id))?.reason);
    flag.reason.or_else(of_field)
}

const fn taken(name: &'static str) -> Flag {
    Flag { name, reason: None }
}

const fn not_taken(name: &'static str, reason: &'static str) -> Flag {
    Flag { name, reason: Some(reason) }
}

const NO_IPVS: &str = "IPVS is not used";
const NO_LIMIT: &str =
    "the API server receives only lists and watches, and its version is asked for while nothing changes";
const NO_SYNC: &str = "every change is applied at once";
const NO_BUFFER: &str = "each line of the log is written at once";
const ONE_STREAM: &str = "the log is one stream";
const NO_EFFECT: &str = "it has no effect there either";

/// All of them.
pub const FLAGS: &[Flag] = &[
    taken("config"),
    taken("kubeconfig"),
    taken("master"),
    taken("hostname-override"),
    taken("feature-gates"),
    taken("bind-address"),
    taken("nodeport-addresses"),
    taken("cluster-cidr"),
    taken("detect-local-mode"),
    taken("pod-bridge-interface"),
    taken("pod-interface-name-prefix"),
    taken("masquerade-all"),
    taken("iptables-masquerade-bit"),
    taken("healthz-bind-address"),
    taken("metrics-bind-address"),
    taken("logging-format"),
    taken("v"),
    taken("help"),
    not_taken("version", "it comes before the command, as in `kube-proxy-ebpf --version`"),
    not_taken(
        "cleanup",
        "it is the command `cleanup`, and `cleanup --kube-proxy` removes kube-proxy's rules",
    ),
    not_taken("healthz-port", "deprecated there, use `--healthz-bind-address`"),
    not_taken("metrics-port", "deprecated there, use `--metrics-bind-address`"),
    not_taken("proxy-mode", "`--backend` chooses between eBPF and nftables"),
    not_taken("bind-address-hard-fail", "a port that is in use is retried"),
    not_taken("profiling", "there is no Go profile"),
    not_taken("show-hidden-metrics-for-version", "there are no hidden metrics"),
    taken("init-only"),
    not_taken("write-config-to", "`--print-config` prints every value"),
    not_taken("config-sync-period", "the API server is watched, without periodic lists"),
    not_taken("kube-api-burst", NO_LIMIT),
    not_taken("kube-api-qps", NO_LIMIT),
    not_taken("kube-api-content-type", "the API server is asked for JSON"),
    not_taken("oom-score-adj", "it is set by the pod's resources or the service unit"),
    not_taken("iptables-localhost-nodeports", "iptables is not used"),
    not_taken("iptables-sync-period", NO_SYNC),
    not_taken("iptables-min-sync-period", NO_SYNC),
    not_taken("ipvs-sync-period", NO_IPVS),
    not_taken("ipvs-min-sync-period", NO_IPVS),
    not_taken("ipvs-scheduler", NO_IPVS),
    not_taken("ipvs-exclude-cidrs", NO_IPVS),
    not_taken("ipvs-strict-arp", NO_IPVS),
    not_taken("ipvs-tcp-timeout", NO_IPVS),
    not_taken("ipvs-tcpfin-timeout", NO_IPVS),
    not_taken("ipvs-udp-timeout", NO_IPVS),
    taken("conntrack-max-per-core"),
    taken("conntrack-min"),
    taken("conntrack-tcp-be-liberal"),
    taken("conntrack-tcp-timeout-established"),
    taken("conntrack-tcp-timeout-close-wait"),
    taken("conntrack-udp-timeout"),
    taken("conntrack-udp-timeout-stream"),
    not_taken("log-flush-frequency", NO_BUFFER),
    not_taken("log-text-info-buffer-size", NO_BUFFER),
    not_taken("log-text-split-stream", ONE_STREAM),
    not_taken("log-json-info-buffer-size", NO_BUFFER),
    not_taken("log-json-split-stream", ONE_STREAM),
    not_taken("vmodule", "the log has one level for all modules"),
    not_taken("boot-id-file", NO_EFFECT),
    not_taken("machine-id-file", NO_EFFECT),
];
