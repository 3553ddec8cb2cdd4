//! Alerts, dashboard and runbook agree with each other and with what the binary serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use api_server::{ApiServer, Settings};
use build_tools::{
    command::{output, workspace},
    programs::promtool,
};
use regex::Regex;
use serde_json::{Value, json};
use tests::{
    AgentCommand, Build, NODE, TestNode,
    deploy::{self, Renderer},
    http::metrics,
    skip,
};

use crate::deploy::{named, with_components};

const UNIT_TESTS: &str = include_str!("alerts.yaml");
const DASHBOARD: &str = include_str!("../../../../deploy/observability/dashboard.json");
const RUNBOOK: &str = include_str!("../../../../docs/runbook.md");
/// What an entry of the runbook consists of.
const PARTS: [&str; 4] = ["Meaning", "Still works", "Look at", "Do"];

/// The `spec` of the PrometheusRule: a file of rules as Prometheus reads it.
fn rules() -> Value {
    let text = include_str!("../../../../deploy/observability/rules.yaml");
    deploy::documents(text).unwrap()[0]["spec"].clone()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not a string"))
}

fn alerts() -> BTreeMap<String, Value> {
    let groups = rules();
    let rules = list(&groups["groups"]).iter().flat_map(|it| list(&it["rules"]));
    rules.map(|it| (string(&it["alert"]).to_owned(), it.clone())).collect()
}

/// Every expression of the dashboard, with values for its variables.
fn dashboard_expressions() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = list(&dashboard["panels"]).iter().filter(|it| it["type"] != "row");
    let targets = panels.flat_map(|it| list(&it["targets"]));
    targets.map(|it| string(&it["expr"]).replace("$__rate_interval", "5m").replace("$node", ".*")).collect()
}

/// The names of our metrics in a text, without the suffixes of histograms.
fn metric_names(text: &str) -> BTreeSet<String> {
    let name = Regex::new(r"\b(kube_proxy_ebpf|kubeproxy|process|rest_client)_[a-z0-9_]+").unwrap();
    let suffixes = ["_bucket", "_sum", "_count"];
    let family = |it: &str| suffixes.iter().find_map(|end| it.strip_suffix(end)).unwrap_or(it).to_owned();
    name.find_iter(text).map(|it| family(it.as_str())).collect()
}

#[test]
fn every_alert_has_an_entry_in_the_runbook_and_every_entry_an_alert() {
    let entries = RUNBOOK.split("\n## ").skip(1).map(|it| it.split_once('\n').unwrap());
    let entries: BTreeMap<_, _> = entries.collect();
    let alerts = alerts();
    assert!(entries.keys().copied().eq(alerts.keys()), "{:?}\n{:?}", entries.keys(), alerts.keys());
    for (alert, entry) in entries {
        let positions: Vec<_> = PARTS.iter().map(|part| entry.find(&format!("\n**{part}.** "))).collect();
        assert!(positions.iter().all(Option::is_some) && positions.is_sorted(), "{alert}: {positions:?}");
    }
    let manifest = fs::read_to_string(workspace().join("Cargo.toml")).unwrap();
    let repository = manifest.split_once("repository = \"").unwrap().1.split('"').next().unwrap();
    for (name, alert) in alerts {
        let annotations = &alert["annotations"];
        let url = format!("{repository}/blob/main/docs/runbook.md#{}", name.to_lowercase());
        assert_eq!(annotations["runbook_url"], url);
        assert!(annotations["summary"].is_string() && annotations["description"].is_string(), "{name}");
        assert!(["critical", "warning"].contains(&string(&alert["labels"]["severity"])), "{name}");
    }
}

/// The names of the labels that each alert has when it fires, by its unit tests, which promtool runs.
fn labels_when_firing() -> BTreeMap<String, Vec<BTreeSet<String>>> {
    let label = Regex::new(r#"([a-z_]+)="([^"]*)""#).unwrap();
    let mut firing = BTreeMap::<_, Vec<_>>::new();
    for test in list(&deploy::documents(UNIT_TESTS).unwrap()[0]["tests"]) {
        for sample in list(&test["promql_expr_test"]).iter().flat_map(|it| list(&it["exp_samples"])) {
            let labels = label.captures_iter(string(&sample["labels"])).map(|it| it.extract::<2>().1);
            let labels: BTreeMap<_, _> = labels.map(|[name, value]| (name, value)).collect();
            let names = labels.keys().map(ToString::to_string).collect();
            firing.entry(labels["alertname"].to_owned()).or_default().push(names);
        }
    }
    firing
}

#[test]
fn every_alert_is_tested_and_its_texts_name_labels_that_it_has() {
    let tests = deploy::documents(UNIT_TESTS).unwrap();
    let tests = list(&tests[0]["tests"]);
    let firing = labels_when_firing();
    let used = Regex::new(r"\$labels\.([a-z_]+)").unwrap();
    for (name, alert) in alerts() {
        let test =
            tests.iter().find(|it| it["name"] == *name).unwrap_or_else(|| panic!("{name} has no test"));
        let expected: Vec<_> = list(&test["promql_expr_test"]).iter().map(|it| &it["exp_samples"]).collect();
        let fires = |it: &Value| it.to_string().contains(&format!("alertname=\\\"{name}\\\""));
        assert!(expected.iter().any(|it| fires(it)) && expected.iter().any(|it| !fires(it)), "{name}");
        let texts = alert["annotations"].to_string();
        for label in used.captures_iter(&texts).map(|it| it.extract::<1>().1[0]) {
            assert!(firing[&name].iter().all(|it| it.contains(label)), "{name} has no label {label}");
        }
    }
}

#[test]
fn promtool_accepts_the_rules_and_the_dashboard_and_the_unit_tests_pass() {
    let promtool = match promtool() {
        Ok(it) => it,
        Err(error) => return skip(&format!("there is no promtool: {error:#}")),
    };
    let folder = tempfile::tempdir().unwrap();
    let write = |name, text: &str| fs::write(folder.path().join(name), text).unwrap();
    // JSON is YAML. Each expression of the dashboard becomes a rule of its own.
    write("rules.yaml", &rules().to_string());
    write("alerts.yaml", UNIT_TESTS);
    let expressions = dashboard_expressions();
    let expressions = expressions.iter().enumerate();
    let recorded: Vec<_> =
        expressions.map(|(n, expr)| json!({ "record": format!("panel:{n}"), "expr": expr })).collect();
    assert!(recorded.len() > 25);
    write("panels.yaml", &json!({ "groups": [{ "name": "panels", "rules": recorded }] }).to_string());
    for arguments in [
        ["check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"].as_slice(),
        &["check", "rules", "panels.yaml"],
        &["test", "rules", "alerts.yaml"],
    ] {
        output(Command::new(&promtool).args(arguments).current_dir(folder.path())).unwrap();
    }
}

#[test]
fn the_dashboard_shows_what_the_alerts_judge() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let ids: BTreeSet<_> = list(&dashboard["panels"]).iter().map(|it| it["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), list(&dashboard["panels"]).len(), "each panel has its own id");
    let shown = metric_names(&dashboard_expressions().join("\n"));
    for (name, alert) in alerts() {
        let judged = metric_names(string(&alert["expr"]));
        assert!(judged.is_subset(&shown), "{name}: {judged:?} is not in the dashboard");
    }
}

#[test]
fn every_metric_of_alerts_dashboard_and_runbook_is_served() {
    let Some(mut node) = TestNode::or_skip() else { return };
    // Only requests to an API server are counted.
    let server = ApiServer::start(Settings::default()).unwrap();
    node.start_with(&AgentCommand::kube(&Build::Product.binary(), node.sandbox(), &server.url(), NODE));
    node.wait_until_ready();
    let page = metrics("/metrics").unwrap().body;
    let headers = page.lines().filter_map(|it| it.strip_prefix("# TYPE ")?.split(' ').next());
    let served: BTreeSet<_> = headers.map(ToOwned::to_owned).collect();
    for text in [&rules().to_string(), DASHBOARD, RUNBOOK] {
        let named = metric_names(text);
        assert!(named.len() > 5, "{named:?}");
        let unknown: Vec<_> = named.difference(&served).collect();
        assert!(unknown.is_empty(), "{unknown:?} are not served");
    }
}

#[test]
fn the_pod_monitors_find_the_pods_and_their_ports() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let observability = renderer.render("observability").unwrap();
    let dashboard = observability.iter().find(|it| it["kind"] == "ConfigMap").unwrap();
    assert_eq!(dashboard["data"]["kube-proxy-ebpf.json"], DASHBOARD);
    let monitor = |name: &str| {
        let is_it = |it: &&Value| it["kind"] == "PodMonitor" && it["metadata"]["name"] == name;
        observability.iter().find(is_it).unwrap()
    };
    let (own, brain) = (monitor("kube-proxy-ebpf"), monitor("kube-proxy-ebpf-brain"));
    check_monitor(own, &with_components(&renderer, "deploy", &["metrics"]), "proxy");
    let split = with_components(&renderer, "deploy/overlays/split", &["metrics-split"]);
    check_monitor(own, &split, "agent");
    check_monitor(brain, &split, "brain");
    let central = with_components(&renderer, "deploy/overlays/central", &["metrics-central"]);
    check_monitor(own, &central, "agent");
    check_monitor(brain, &central, "brain");
}

/// A monitor finds the port of a container at which the metrics are served, and its name is the job of their series.
#[track_caller]
fn check_monitor(monitor: &Value, objects: &[Value], container: &str) {
    let mut templates = objects.iter().map(|it| &it["spec"]["template"]);
    let (pods, container) =
        templates.find_map(|it| Some((it, named(&it["spec"]["containers"], container)?))).unwrap();

    assert_eq!(monitor["metadata"]["namespace"], "kube-system");
    let labels = &pods["metadata"]["labels"];
    let selector = &monitor["spec"]["selector"];
    for (label, value) in selector["matchLabels"].as_object().into_iter().flatten() {
        assert_eq!(labels[label], *value);
    }
    for it in selector["matchExpressions"].as_array().into_iter().flatten() {
        assert_eq!(it["operator"], "In");
        assert!(list(&it["values"]).contains(&labels[string(&it["key"])]), "{labels}");
    }
    for endpoint in list(&monitor["spec"]["podMetricsEndpoints"]) {
        let port = named(&container["ports"], string(&endpoint["port"])).unwrap();
        let is_address = |it: &&Value| string(&it["name"]).ends_with("METRICS_BIND_ADDRESS");
        let addresses: Vec<_> = list(&container["env"]).iter().filter(is_address).collect();
        let [address] = addresses[..] else { panic!("{addresses:?}") };
        assert_eq!(address["value"], format!("0.0.0.0:{}", port["containerPort"]));
        assert_eq!(endpoint["honorLabels"], true, "the labels of metrics of Services are their own");
        let relabeled = list(&endpoint["relabelings"]).iter().find(|it| it["targetLabel"] == "job");
        let of_label = || &labels[string(&monitor["spec"]["jobLabel"])];
        // As in the rules.
        assert_eq!(*relabeled.map_or_else(of_label, |it| &it["replacement"]), monitor["metadata"]["name"]);
    }
}
