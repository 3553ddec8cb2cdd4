//! The fields of a `KubeProxyConfiguration`, and how each is used.
//!
//! Invariant: a field without a flag has a reason, in words for users who have set it.

#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// The path, as in `clientConnection.kubeconfig`; with `.*` at the end, all fields below it.
    pub path: &'static str,
    /// kube-proxy's defaults; an empty value means the same.
    pub defaults: &'static [&'static str],
    /// The id of the corresponding flag.
    pub flag: Option<&'static str>,
    /// Why a command without such a flag does not need the field.
    pub reason: &'static str,
}

/// The field at a path.
pub(super) fn field(path: &str) -> Option<Field> {
    FIELDS.iter().copied().find(|it| match it.path.strip_suffix(".*") {
        Some(above) => path.strip_prefix(above).is_some_and(|it| it.is_empty() || it.starts_with('.')),
        None => it.path == path,
    })
}

const fn unused(path: &'static str, defaults: &'static [&'static str], reason: &'static str) -> Field {
    Field { path, defaults, flag: None, reason }
}

const fn flag(
    path: &'static str,
    flag: &'static str,
    defaults: &'static [&'static str],
    reason: &'static str,
) -> Field {
    Field { path, defaults, flag: Some(flag), reason }
}

const NO_PACKETS: &str = "this command does not translate packets";
const NODE_PORT_ADDRESSES: &str = "--nodeport-addresses says where node ports are served";
const NO_IPVS: &str = "IPVS is not used";
const NO_SYNC: &str = "every change is applied at once, at a cost proportional to its size";
const NO_WINDOWS: &str = "this is not a Windows node";
const NO_LIMIT: &str = "the API server receives only lists and watches, four at a time, and its version is \
                        asked for while nothing changes";
const NO_FORMAT: &str = "the API server is asked for JSON, and only the needed fields are decoded";
const NO_NODE_PORTS: &str = "this command serves no node ports";
const NO_LOG_BUFFER: &str = "each line of the log is written at once";

/// All fields, in the order of the documents.
pub const FIELDS: &[Field] = &[
    flag("clientConnection.kubeconfig", "kubeconfig", &[], "the source is not an API server"),
    flag("hostnameOverride", "node_name", &[], "this command needs no node name"),
    flag("logging.format", "log_format", &["text"], "the log has one format"),
    flag("logging.verbosity", "verbose", &[], "the log has one level"),
    flag("featureGates", "feature_gates", &[], "these feature gates are kube-proxy's own"),
    flag(
        "healthzBindAddress",
        "healthz_bind_address",
        &["0.0.0.0:10256"],
        "it is the agent's, and --healthz-bind-address sets the brain's",
    ),
    flag(
        "metricsBindAddress",
        "metrics_bind_address",
        &["127.0.0.1:10249"],
        "it is the agent's, and --metrics-bind-address sets the brain's",
    ),
    flag("nodePortAddresses", "node_port_addresses", &[], NO_NODE_PORTS),
    flag("bindAddress", "bind_address", &["0.0.0.0", "::"], NO_NODE_PORTS),
    flag("clusterCIDR", "cluster_cidr", &[], NO_PACKETS),
    flag("detectLocalMode", "detect_local_mode", &["ClusterCIDR"], NO_PACKETS),
    flag("detectLocal.bridgeInterface", "pod_bridge_interface", &[], NO_PACKETS),
    flag("detectLocal.interfaceNamePrefix", "pod_interface_name_prefix", &[], NO_PACKETS),
    // Like kube-proxy, only the section of the mode is used.
    flag("iptables.masqueradeAll", "masquerade_all", &[], NO_PACKETS),
    flag("iptables.masqueradeBit", "nft_masquerade_bit", &["14"], NO_PACKETS),
    flag("nftables.masqueradeAll", "masquerade_all", &[], NO_PACKETS),
    flag("nftables.masqueradeBit", "nft_masquerade_bit", &["14"], NO_PACKETS),
    flag("conntrack.maxPerCore", "conntrack_max_per_core", &["32768", "0"], NO_PACKETS),
    flag("conntrack.min", "conntrack_min", &["131072"], NO_PACKETS),
    flag(
        "conntrack.tcpEstablishedTimeout",
        "conntrack_tcp_timeout_established",
        &["24h0m0s", "24h"],
        NO_PACKETS,
    ),
    flag("conntrack.tcpCloseWaitTimeout", "conntrack_tcp_timeout_close_wait", &["1h0m0s", "1h"], NO_PACKETS),
    flag("conntrack.tcpBeLiberal", "conntrack_tcp_be_liberal", &["false"], NO_PACKETS),
    flag("conntrack.udpTimeout", "conntrack_udp_timeout", &["0s"], NO_PACKETS),
    flag("conntrack.udpStreamTimeout", "conntrack_udp_timeout_stream", &["0s"], NO_PACKETS),
    unused("clientConnection.acceptContentTypes", &[], NO_FORMAT),
    unused(
        "clientConnection.contentType",
        &["application/vnd.kubernetes.protobuf", "application/json"],
        NO_FORMAT,
    ),
    unused("clientConnection.qps", &["5"], NO_LIMIT),
    unused("clientConnection.burst", &["10"], NO_LIMIT),
    unused("logging.flushFrequency", &["5s", "5000000000"], NO_LOG_BUFFER),
    unused("logging.vmodule", &[], "the log has one level for all modules"),
    unused("logging.options.*", &["0"], NO_LOG_BUFFER),
    unused("bindAddressHardFail", &[], "a port that is in use is retried, and the datapath is not affected"),
    unused("enableProfiling", &[], "there is no Go profile"),
    unused("showHiddenMetricsForVersion", &[], "there are no hidden metrics"),
    // It also implies a default of another field.
    unused("mode", &["nftables"], "--backend chooses between eBPF and nftables"),
    unused("iptables.localhostNodePorts", &["true"], NODE_PORT_ADDRESSES),
    unused("iptables.syncPeriod", &["30s"], NO_SYNC),
    unused("iptables.minSyncPeriod", &["1s"], NO_SYNC),
    unused("ipvs.*", &["30s"], NO_IPVS),
    unused("nftables.syncPeriod", &["30s"], NO_SYNC),
    unused("nftables.minSyncPeriod", &["1s"], NO_SYNC),
    unused("winkernel.*", &[], NO_WINDOWS),
    unused("windowsRunAsService", &[], NO_WINDOWS),
    unused("oomScoreAdj", &["-999"], "it is set by the pod's resources or the service unit"),
    unused("configSyncPeriod", &["15m0s", "15m"], "the API server is watched, without periodic lists"),
    unused("portRange", &[], "the proxy itself opens no ports for Services"),
    // From earlier versions.
    unused("udpIdleTimeout", &["250ms"], "it belonged to a kube-proxy mode that no longer exists"),
    unused("resourceContainer", &["/kube-proxy"], "it belonged to a kube-proxy mode that no longer exists"),
];
