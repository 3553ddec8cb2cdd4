//! The fields of a `KubeProxyConfiguration`, and what becomes of each.
//!
//! The one rule: a field without a flag says why none is needed, in words for those who have set it.

/// One field.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    /// As in `clientConnection.kubeconfig`; with `.*` at the end, all below it.
    pub(super) path: &'static str,
    /// What kube-proxy takes if nothing is said; an empty value means the same.
    pub(super) defaults: &'static [&'static str],
    /// The id of the flag of the same meaning, where the command has one.
    pub(super) flag: Option<&'static str>,
    /// Why the field is not needed where there is no such flag.
    pub(super) because: &'static str,
}

/// The field at a path.
pub(super) fn field(path: &str) -> Option<Field> {
    FIELDS.iter().copied().find(|it| match it.path.strip_suffix(".*") {
        Some(above) => path.strip_prefix(above).is_some_and(|it| it.is_empty() || it.starts_with('.')),
        None => it.path == path,
    })
}

const fn unused(path: &'static str, defaults: &'static [&'static str], because: &'static str) -> Field {
    Field { path, defaults, flag: None, because }
}

const fn flag(
    path: &'static str,
    flag: &'static str,
    defaults: &'static [&'static str],
    because: &'static str,
) -> Field {
    Field { path, defaults, flag: Some(flag), because }
}

const NO_PACKETS: &str = "no packet is translated by this command";
const NO_CONNTRACK: &str = "how connections are tracked is the host's to say (sysctl net.netfilter)";
const NO_IPTABLES: &str = "iptables is not used";
const NO_IPVS: &str = "IPVS is not used";
const NO_SYNC: &str = "every change is put into force at once, and costs what it touches";
const NO_WINDOWS: &str = "this is no Windows node";
const NO_LIMIT: &str = "nothing but lists and watches is asked of the API server, three at a time";
const NO_FORMAT: &str = "the API server is asked for JSON, of which only what is needed is decoded";
const NO_ADDRESS: &str = "nothing depends on the node's primary address";
const ITS_LOG: &str = "the log is written line by line, without a buffer";

const FIELDS: &[Field] = &[
    flag("clientConnection.kubeconfig", "kubeconfig", &[], "the source is no API server"),
    flag("hostnameOverride", "node_name", &[], "no node has to be named"),
    flag("logging.format", "log_format", &["text"], "the log has one format"),
    flag("logging.verbosity", "verbose", &[], "the log has one level"),
    flag("featureGates", "feature_gates", &[], "the features that the gates stand for are kube-proxy's own"),
    flag(
        "healthzBindAddress",
        "healthz_bind_address",
        &["0.0.0.0:10256"],
        "health is not served by this command",
    ),
    flag(
        "metricsBindAddress",
        "metrics_bind_address",
        &["127.0.0.1:10249"],
        "metrics are not served by this command",
    ),
    flag("nodePortAddresses", "node_port_addresses", &[], "no node port is served by this command"),
    flag("clusterCIDR", "cluster_cidr", &[], NO_PACKETS),
    flag("detectLocalMode", "detect_local_mode", &["ClusterCIDR"], NO_PACKETS),
    flag("detectLocal.bridgeInterface", "pod_bridge_interface", &[], NO_PACKETS),
    flag("detectLocal.interfaceNamePrefix", "pod_interface_name_prefix", &[], NO_PACKETS),
    // kube-proxy reads the section of its mode, and so do we: what it says of packets is meant.
    flag("iptables.masqueradeAll", "masquerade_all", &[], NO_PACKETS),
    flag("iptables.masqueradeBit", "nft_masquerade_bit", &["14"], NO_PACKETS),
    flag("nftables.masqueradeAll", "masquerade_all", &[], NO_PACKETS),
    flag("nftables.masqueradeBit", "nft_masquerade_bit", &["14"], NO_PACKETS),
    unused("clientConnection.acceptContentTypes", &[], NO_FORMAT),
    unused(
        "clientConnection.contentType",
        &["application/vnd.kubernetes.protobuf", "application/json"],
        NO_FORMAT,
    ),
    unused("clientConnection.qps", &["5"], NO_LIMIT),
    unused("clientConnection.burst", &["10"], NO_LIMIT),
    unused("logging.flushFrequency", &["5s", "5000000000"], ITS_LOG),
    unused("logging.vmodule", &[], "the log has one level for all modules"),
    unused("logging.options.*", &["0"], ITS_LOG),
    unused("bindAddress", &["0.0.0.0", "::"], NO_ADDRESS),
    unused("bindAddressHardFail", &[], "a port that is in use is tried again, while the data plane goes on"),
    unused("enableProfiling", &[], "there is no profile of Go to be served"),
    unused("showHiddenMetricsForVersion", &[], "no metric is hidden"),
    unused("mode", &[], "--backend says how connections are led, by eBPF or by nftables"),
    unused("iptables.localhostNodePorts", &["true"], NO_IPTABLES),
    unused("iptables.syncPeriod", &["30s"], NO_SYNC),
    unused("iptables.minSyncPeriod", &["1s"], NO_SYNC),
    unused("ipvs.*", &["30s"], NO_IPVS),
    unused("nftables.syncPeriod", &["30s"], NO_SYNC),
    unused("nftables.minSyncPeriod", &["1s"], NO_SYNC),
    unused("winkernel.*", &[], NO_WINDOWS),
    unused("windowsRunAsService", &[], NO_WINDOWS),
    unused("oomScoreAdj", &["-999"], "it is set from outside, by the pod's resources or its service unit"),
    unused("conntrack.maxPerCore", &["32768"], NO_CONNTRACK),
    unused("conntrack.min", &["131072"], NO_CONNTRACK),
    unused("conntrack.tcpEstablishedTimeout", &["24h0m0s", "24h"], NO_CONNTRACK),
    unused("conntrack.tcpCloseWaitTimeout", &["1h0m0s", "1h"], NO_CONNTRACK),
    unused("conntrack.tcpBeLiberal", &[], NO_CONNTRACK),
    unused("conntrack.udpTimeout", &[], NO_CONNTRACK),
    unused("conntrack.udpStreamTimeout", &[], NO_CONNTRACK),
    unused(
        "configSyncPeriod",
        &["15m0s", "15m"],
        "the API server is watched, and never asked again without a reason",
    ),
    unused("portRange", &[], "no ports of the node are taken by the proxy itself"),
    // Of earlier versions.
    unused("udpIdleTimeout", &["250ms"], "it was for a mode of kube-proxy that is no more"),
    unused("resourceContainer", &["/kube-proxy"], "it was for a mode of kube-proxy that is no more"),
];
