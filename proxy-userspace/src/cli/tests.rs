//! The command line as a whole, and the precedence of flags and configuration file.

use std::{collections::BTreeSet, fs, iter, path::Path};

use api_server::{ApiServer, Settings};
use clap::Command;

use super::{
    command,
    config::{CommandLine, File, ParseError},
};

const KUBEADM: &str = include_str!("kubeadm-config.yaml");
/// How each file begins.
const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

/// Parses words after the name of the program.
fn parse(words: &[&str]) -> Result<CommandLine, ParseError> {
    let words = iter::once("kube-proxy-ebpf").chain(words.iter().copied());
    CommandLine::parse(command(), words.map(Into::into))
}

/// The error of a wrong command line.
#[track_caller]
fn usage_error(parsed: Result<CommandLine, ParseError>) -> String {
    match parsed {
        Err(ParseError::Usage(error)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Parses `run --config FILE` with more words, where the file has this text.
fn line(text: &str, words: &[&str]) -> Result<CommandLine, ParseError> {
    line_of("run", text, words)
}

/// The same with another command.
fn line_of(name: &str, text: &str, words: &[&str]) -> Result<CommandLine, ParseError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.conf");
    fs::write(&path, text).unwrap();
    parse(&[&[name, &format!("--config={}", path.display())], words].concat())
}

fn remarks(text: &str) -> Vec<String> {
    let line = line(&format!("{HEAD}{text}"), &[]).unwrap();
    line.remarks().map(|it| it.split_once(": ").unwrap().1.to_owned()).collect()
}

#[track_caller]
fn check_rejected(text: &str, words: &[&str]) {
    let Err(ParseError::File(error)) = line(text, &[]) else { panic!("{text} is accepted") };
    let error = error.to_string();
    assert!(!error.contains('\n'), "{error}");
    for word in words {
        assert!(error.contains(word), "{word} is not in {error}");
    }
}

/// Checks rows in the output of `--print-config`, with single blanks; each begins with its flag.
#[track_caller]
fn check_rows(line: &CommandLine, expect: &[&str]) {
    let printed = line.printed().unwrap();
    let rows: Vec<_> =
        printed.lines().map(|it| it.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for it in expect {
        assert!(rows.iter().any(|row| row == it), "{it} is not in\n{printed}");
    }
}

/// Checks such rows of `NAME --config FILE` with more words, and a part of each remark.
#[track_caller]
fn check(name: &str, text: &str, words: &[&str], rows: &[&str], remarks: &[&str]) {
    let line = line_of(name, text, &[words, &["--print-config"]].concat()).unwrap();
    check_rows(&line, rows);
    let found: Vec<_> = line.remarks().collect();
    assert_eq!(found.len(), remarks.len(), "{found:?}");
    for it in remarks {
        assert!(found.iter().any(|found| found.contains(it)), "{it} is not in {found:?}");
    }
}

#[test]
fn a_kubeadm_configuration_is_accepted_unchanged() {
    let rows = [
        "--cluster-cidr 10.244.0.0/16 file: clusterCIDR",
        "--source kube file: kind",
        "--node-name worker-1 flag",
        "--kubeconfig /var/lib/kube-proxy/kubeconfig.conf file: clientConnection.kubeconfig",
        "--pin-dir /sys/fs/bpf/kube-proxy-ebpf default",
    ];
    check("run", KUBEADM, &["--node-name=worker-1"], &rows, &[]);
}

#[test]
fn a_flag_overrides_the_file() {
    let text = KUBEADM.replace("hostnameOverride: \"\"", "hostnameOverride: from-file");
    check("run", &text, &[], &["--node-name from-file file: hostnameOverride"], &[]);
    let rows = ["--node-name n1 flag", "--source file:x flag", "--kubeconfig k flag"];
    check("run", &text, &["--node-name=n1", "--source=file:x", "--kubeconfig=k"], &rows, &[]);
}

#[test]
fn an_agent_uses_its_part_of_the_file() {
    let text = KUBEADM
        .replacen("masqueradeAll: false", "masqueradeAll: true", 1)
        .replace("metricsBindAddress: \"\"", "metricsBindAddress: 127.0.0.2:10249")
        .replace("nodePortAddresses: null", "nodePortAddresses: [192.0.2.0/24]")
        .replace("hostnameOverride: \"\"", "hostnameOverride: n1");
    let rows = [
        "--masquerade-all true file: iptables.masqueradeAll",
        "--metrics-bind-address 127.0.0.2:10249 file: metricsBindAddress",
        "--nodeport-addresses 192.0.2.0/24 file: nodePortAddresses",
        "--node-name n1 file: hostnameOverride",
    ];
    // Only the brain needs it.
    check("agent", &text, &[], &rows, &["clientConnection.kubeconfig"]);
}

#[test]
fn a_brain_leaves_the_ports_of_the_file_to_the_agent() {
    let text = KUBEADM
        .replace("metricsBindAddress: \"\"", "metricsBindAddress: 127.0.0.2:10249")
        .replace("healthzBindAddress: \"\"", "healthzBindAddress: 0.0.0.0:10256");
    let listen = ["--print-config", "--node-name=n1", "--listen=unix:///tmp/brain.sock"];
    let brain = line_of("brain", &text, &listen).unwrap();
    check_rows(&brain, &["--healthz-bind-address 0 default", "--metrics-bind-address 0 default"]);
    let remarks: Vec<_> = brain.remarks().collect();
    let about: Vec<_> = remarks.iter().filter(|it| it.contains("BindAddress")).collect();
    assert_eq!(about.len(), 1, "kube-proxy's own default needs no remark: {remarks:?}");
    assert!(about[0].contains("metricsBindAddress: 127.0.0.2:10249 is ignored"), "{about:?}");
    let given = line_of("brain", &text, &[&listen[..], &["--metrics-bind-address=127.0.0.1:1"]].concat());
    check_rows(&given.unwrap(), &["--metrics-bind-address 127.0.0.1:1 flag"]);
}

#[test]
fn flags_are_under_the_heading_of_their_subject() {
    let mut all = command();
    all.build();
    for (heading, prefixes) in [
        ("Passive health of endpoints", &["passive-health"][..]),
        ("Connection tracking", &["conntrack-", "proc-sys-net"]),
        ("Other processes", &["listen", "socket-mode", "socket-group", "tls-", "serve-any-node"]),
        ("Logging", &["log-format", "verbose", "v"]),
    ] {
        for it in all.get_subcommands().flat_map(Command::get_arguments) {
            let is_there = it.get_help_heading() == Some(heading) && !it.is_hide_set();
            let long = it.get_long().unwrap_or_default();
            assert!(!is_there || prefixes.iter().any(|prefix| long.starts_with(prefix)), "{heading}: {long}");
        }
        let run = all.find_subcommand("run").unwrap();
        assert!(run.get_arguments().any(|it| it.get_help_heading() == Some(heading)), "{heading}");
    }
}

#[test]
fn commands_that_only_inspect_use_the_file_without_remarks() {
    for command in ["check", "status"] {
        let invalid = KUBEADM.replace("metricsBindAddress: \"\"", "metricsBindAddress: nowhere");
        let Err(ParseError::File(error)) = line_of(command, &invalid, &[]) else {
            panic!("the file is ignored")
        };
        assert!(error.to_string().contains("nowhere"), "{error}");
        let line = line_of(command, KUBEADM, &[]).unwrap();
        assert_eq!(line.remarks().collect::<Vec<_>>(), [""; 0], "{command}");
    }
}

#[test]
fn commands_that_inspect_take_the_flags_that_the_process_was_started_with() {
    let run = "--source=kube --kube-api-server=https://192.0.2.1:6443 --node-name=n1 --packets=off --backend=ebpf \
               --cluster-cidr=10.0.0.0/8 --masquerade-all --socket-lb=host --pin-dir=/pins --cgroup=/cgroup \
               --status-socket=/status --metrics-bind-address=0 --feature-gates=NFTablesProxyMode=true \
               --listen=unix:///x --nodeport-addresses=primary";
    let agent = "--target=unix:///x --packets=off --tls-ca=ca --tls-cert=cert --tls-key=key";
    for (started, flags) in [("run", run), ("agent", agent)] {
        let flags: Vec<_> = flags.split(' ').collect();
        for command in [started, "check", "status", "dump"] {
            let line = line_of(command, KUBEADM, &flags);
            assert!(line.is_ok(), "{command}: {line:?}");
        }
    }
    // Not what belongs to one call.
    assert!(line_of("status", KUBEADM, &["--print-config"]).is_err());
    let mut command = command();
    let help = command.find_subcommand_mut("dump").unwrap().render_long_help().to_string();
    assert!(help.contains("--pin-dir") && !help.contains("--cluster-cidr"), "{help}");
}

#[test]
fn the_file_configures_the_log() {
    let text = KUBEADM.replace("  verbosity: 0", "  verbosity: 4\n  format: json");
    let rows = ["--verbose 1 file: logging.verbosity", "--log-format json file: logging.format"];
    check("run", &text, &[], &rows, &[]);
}

#[test]
fn an_invalid_value_is_reported_with_its_field() {
    let with = |field: &str, value: &str| {
        let others = KUBEADM.lines().filter(|it| !it.starts_with(&format!("{field}:")));
        format!("{}\n{field}: {value}\n", others.collect::<Vec<_>>().join("\n"))
    };
    let name = with("hostnameOverride", "a/b");
    check_rejected(&name, &["config.conf: hostnameOverride: \"a/b\" cannot be used: ", "lower-case"]);
    check_rejected(&with("clusterCIDR", "10.244.0.0/33"), &["config.conf: clusterCIDR: \"10.244.0.0/33\""]);
    let mode = with("detectLocalMode", "Magic");
    check_rejected(&mode, &["config.conf: detectLocalMode: \"Magic\"", "use one of", "BridgeInterface"]);
    check_rejected(&with("healthzBindAddress", "nowhere"), &["healthzBindAddress: \"nowhere\""]);
    // An invalid flag is reported as such, and a valid one overrides the file.
    let error = usage_error(line(&name, &["--cluster-cidr=x"]));
    assert!(error.contains("--cluster-cidr"), "{error}");
    line(&name, &["--node-name=n1"]).unwrap();
}

#[test]
fn the_field_of_a_flags_value_is_known() {
    let text = KUBEADM.replace("detectLocalMode: \"\"", "detectLocalMode: BridgeInterface");
    let line = line(&text, &["--cluster-cidr=10.0.0.0/8"]).unwrap();
    let origins = line.origins();
    let of = |flag: &str| origins.iter().find(|it| it.0 == flag).map(|it| it.1.as_str());
    assert!(of("--detect-local-mode").is_some_and(|it| it.ends_with("config.conf: detectLocalMode")));
    assert_eq!(of("--cluster-cidr"), None, "the flag overrides the file");
}

#[test]
fn ignored_fields_are_reported_with_the_reason() {
    assert_eq!(
        remarks("ipvs: {scheduler: rr}\nmode: ipvs\nwinkernel: {enableDSR: true}\n"),
        [
            "ipvs.scheduler: rr is ignored, because IPVS is not used",
            "mode: ipvs is ignored, because --backend chooses between eBPF and nftables",
            "winkernel.enableDSR: true is ignored, because this is not a Windows node",
        ]
    );
}

#[test]
fn the_file_configures_the_nftables_path() {
    let fields = "clusterCIDR: 10.244.0.0/16,fd00:10:244::/56\ndetectLocalMode: InterfaceNamePrefix\n\
                  detectLocal: {interfaceNamePrefix: veth}\n\
                  iptables: {masqueradeAll: true, masqueradeBit: 15}\nnftables: {masqueradeBit: 16}\n";
    let rows = [
        "--cluster-cidr 10.244.0.0/16,fd00:10:244::/56 file: clusterCIDR",
        "--detect-local-mode InterfaceNamePrefix file: detectLocalMode",
        "--pod-interface-name-prefix veth file: detectLocal.interfaceNamePrefix",
        "--masquerade-all true file: iptables.masqueradeAll",
        "--nft-masquerade-bit 15 file: iptables.masqueradeBit",
    ];
    check("run", &format!("{HEAD}{fields}"), &[], &rows, &["nftables.masqueradeBit: 16 is ignored"]);
    // Only the section of the mode is used.
    let nftables = line(&format!("{HEAD}{fields}mode: nftables\n"), &["--print-config"]).unwrap();
    check_rows(
        &nftables,
        &["--masquerade-all false default", "--nft-masquerade-bit 16 file: nftables.masqueradeBit"],
    );
}

#[test]
fn the_file_configures_connection_tracking() {
    let text = HEAD.to_owned()
        + "conntrack: {maxPerCore: 0, min: null, tcpEstablishedTimeout: 24h0m0s, tcpCloseWaitTimeout: 0s, \
           tcpBeLiberal: true, udpTimeout: 0s, udpStreamTimeout: 3m}\n";
    let rows = [
        "--conntrack-max-per-core 0 file: conntrack.maxPerCore",
        "--conntrack-min 131072 default",
        "--conntrack-tcp-timeout-established 24h0m0s file: conntrack.tcpEstablishedTimeout",
        "--conntrack-tcp-timeout-close-wait 0s file: conntrack.tcpCloseWaitTimeout",
        "--conntrack-tcp-be-liberal true file: conntrack.tcpBeLiberal",
        "--conntrack-udp-timeout-stream 3m file: conntrack.udpStreamTimeout",
    ];
    check("run", &text, &[], &rows, &[]);
    check_rejected(&text.replace("3m", "500ms"), &["conntrack.udpStreamTimeout", "shorter than a second"]);
}

#[test]
fn zero_and_false_are_values_where_kube_proxy_has_a_default_for_null() {
    let fields = "oomScoreAdj: 0\niptables: {masqueradeBit: 0, localhostNodePorts: false}\n";
    let rows = ["--nft-masquerade-bit 0 file: iptables.masqueradeBit"];
    let remarks = ["iptables.localhostNodePorts: false is ignored", "oomScoreAdj: 0 is ignored"];
    check("run", &format!("{HEAD}{fields}"), &[], &rows, &remarks);
}

#[test]
fn an_empty_value_is_the_default_switches_off_or_is_refused() {
    let parse = |words: &[&str]| parse(&[&["agent", "--print-config"], words].concat());
    let empty = ["--cluster-cidr=", "--nodeport-addresses=", "--bind-address=", "--hostname-override="];
    assert_eq!(parse(&empty).unwrap().printed(), parse(&[]).unwrap().printed());
    check_rows(&parse(&["--metrics-bind-address="]).unwrap(), &["--metrics-bind-address flag"]);
    for refused in [&["--tls-ca=", "--tls-cert=", "--tls-key="][..], &["--cgroup="]] {
        assert!(parse(refused).is_err(), "{refused:?}");
    }
}

#[test]
fn node_ports_are_served_at_the_primary_address_in_nftables_mode() {
    let text = |rest: &str| format!("{HEAD}{rest}\n");
    for (rest, row) in [
        ("mode: nftables", "--nodeport-addresses primary file: mode"),
        ("mode: nftables\nnodePortAddresses: []", "--nodeport-addresses primary file: mode"),
        (
            "mode: nftables\nnodePortAddresses: [192.0.2.0/24]",
            "--nodeport-addresses 192.0.2.0/24 file: nodePortAddresses",
        ),
        ("mode: iptables", "--nodeport-addresses default"),
        ("bindAddress: 192.0.2.7", "--bind-address 192.0.2.7 file: bindAddress"),
    ] {
        check_rows(&line(&text(rest), &["--print-config"]).unwrap(), &[row]);
    }
    // A flag wins.
    let flag = line(&text("mode: nftables"), &["--print-config", "--nodeport-addresses=0.0.0.0/0"]).unwrap();
    check_rows(&flag, &["--nodeport-addresses 0.0.0.0/0 flag"]);
}

#[test]
fn kube_proxys_defaults_are_not_reported() {
    let defaults = "bindAddress: 0.0.0.0\nconfigSyncPeriod: 15m0s\nconntrack: {maxPerCore: 32768, min: 131072}\n\
                    iptables: {masqueradeBit: 14, syncPeriod: 30s, minSyncPeriod: 1s}\noomScoreAdj: -999\n";
    assert_eq!(remarks(defaults), Vec::<String>::new());
}

#[test]
fn an_unknown_field_is_reported() {
    let remarks = remarks("clientConection: {kubeconfig: x}\nconntrack: {maximum: 0}\n");
    assert_eq!(remarks.len(), 2);
    assert!(remarks[0].starts_with("clientConection.kubeconfig is unknown"), "{remarks:?}");
    assert!(remarks[1].starts_with("conntrack.maximum is unknown"), "{remarks:?}");
}

#[test]
fn of_a_field_that_is_listed_twice_the_last_one_counts() {
    let text = format!("{HEAD}hostnameOverride: n1\nhostnameOverride: n2\n");
    let line = line(&text, &["--print-config"]).unwrap();
    check_rows(&line, &["--node-name n2 file: hostnameOverride"]);
    let remarks: Vec<_> = line.remarks().collect();
    assert_eq!(remarks.len(), 1, "{remarks:?}");
    assert!(
        remarks[0].contains("hostnameOverride") && remarks[0].ends_with("the last one is used"),
        "{remarks:?}"
    );
}

#[test]
fn other_files_are_rejected_with_a_remedy() {
    check_rejected("a: [", &["config.conf", "correct the YAML"]);
    check_rejected("a: b", &["without apiVersion and kind", "KubeProxyConfiguration"]);
    check_rejected(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha2\nkind: KubeProxyConfiguration\n",
        &["v1alpha2", "convert it to kubeproxy.config.k8s.io/v1alpha1"],
    );
    check_rejected("apiVersion: v1\nkind: ConfigMap\n", &["v1 ConfigMap", "config.conf"]);
    check_rejected(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n",
        &["KubeletConf"],
    );
    check_rejected(
        &KUBEADM.replace("hostnameOverride: \"\"", "hostnameOverride: [a, b]"),
        &["hostnameOverride", "single value"],
    );
    let missing = File::read(Path::new("/no/such/file"), |_| true).unwrap_err().to_string();
    assert!(missing.contains("set --config to a readable file"), "{missing}");
}

#[test]
fn without_a_file_the_source_is_required() {
    let error = usage_error(parse(&["run"]));
    assert!(error.contains("--source"), "{error}");
}

/// The kubeconfig of kubeadm's kube-proxy.
#[tokio::test]
async fn a_kubeadm_kubeconfig_is_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    // It refers to files in a pod.
    let mounted = "/var/run/secrets/kubernetes.io/serviceaccount";
    let text = include_str!("kubeadm-kubeconfig.yaml").replace(mounted, &folder.path().display().to_string());
    let path = write("kubeconfig.conf", &text);
    write("token", "secret\n");
    let start = || {
        let client_config =
            source::kube::ClientConfig { kubeconfig: Some(path.clone().into()), ..Default::default() };
        source::kube::KubeSource::start(&source::kube::Options { client_config, ..Default::default() })
            .map(drop)
    };
    let error = start().unwrap_err().to_string();
    assert!(error.contains("ca.crt"), "{error}");
    // Any CA works: no connection is made.
    let other = ApiServer::start(Settings { is_tls: true, ..Settings::default() }).unwrap();
    other.kubeconfig(folder.path()).unwrap();
    start().unwrap();
}

#[test]
fn the_command_line_is_consistent() {
    command().debug_assert();
}

#[test]
fn each_flag_has_an_environment_variable_except_those_that_belong_to_one_call() {
    let mut command = command();
    command.build();
    let flags = command.get_subcommands().filter(|it| it.get_name() != "help").flat_map(|it| {
        // What is accepted and ignored needs none.
        // The source of a question is not that of the process, and a trace is one call, as are the cases of a backend.
        let is_asked = |flag: &clap::Arg| match it.get_name() {
            "explain" => flag.get_long() == Some("source"),
            "trace" => flag.get_long() != Some("status-socket"),
            "backend-conformance" => true,
            _ => false,
        };
        let flags = it.get_arguments().filter(move |it| !it.is_hide_set() && !is_asked(it));
        let without = flags.filter(|it| it.get_env().is_none()).filter_map(clap::Arg::get_long);
        without.filter(|it| !matches!(*it, "help" | "version"))
    });
    let flags: BTreeSet<_> = flags.collect();
    // Not the constant of the product, which would agree with itself.
    let expected = "anonymize behind filter force has init-only kube-proxy limit once print-config sort \
                    wait-for-kube-proxy watch";
    assert_eq!(flags, expected.split(' ').collect::<BTreeSet<_>>());
}

#[test]
fn a_flag_of_kube_proxy_that_has_no_meaning_is_answered_with_the_reason() {
    let error = |words: &[&str]| usage_error(parse(words));
    let run = error(&["run", "--source=kube", "--iptables-min-sync-period=1s"]);
    for it in ["'--iptables-min-sync-period'", "kube-proxy's", "every change is applied at once"] {
        assert!(run.contains(it), "{it} is not in {run}");
    }
    assert!(!run.contains("similar"), "{run}");
    let brain = error(&["brain", "--source=kube", "--cluster-cidr=10.0.0.0/8"]);
    assert!(brain.contains("this command does not translate packets"), "{brain}");
    // Other flags have the usual answer.
    let misspelled = error(&["run", "--source=kube", "--cluster-cdr=10.0.0.0/8"]);
    assert!(misspelled.contains("similar") && misspelled.contains("--cluster-cidr"), "{misspelled}");
    let with_file = usage_error(line(KUBEADM, &["--ipvs-scheduler=rr"]));
    assert!(with_file.contains("IPVS is not used"), "{with_file}");
}

#[test]
fn the_level_of_kube_proxys_log_is_accepted() {
    for (words, row) in [(&["--v=2"][..], "--v 2 flag"), (&["--v", "4"], "--v 4 flag")] {
        check("run", KUBEADM, words, &[row], &[]);
    }
    assert_eq!([0, 2, 4, 5, 6, 10].map(kube_proxy_config::verbosity), [0, 0, 1, 1, 2, 2]);
}
