//! Every scenario against the kernel: what `dump` prints, who answers at each frontend, what is logged and counted.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::ErrorKind,
    net::SocketAddr,
};

use scenarios::{Answer, Scenario, Step};
use serde_json::Value;
use tests::{
    AgentCommand, Build, EchoServer, Explained, TIMEOUT, TestNode, Transport, eventually, kernel_at_least,
    metric, request,
};

/// Addresses of the node, at which node ports are tried.
const NODE_ADDRESSES: [&str; 2] = ["192.0.2.251", "2001:db8::251"];

/// Within how many requests per endpoint all endpoints answer. Of ten it misses one with a probability of 3e-4 per frontend
/// at 100 requests; scenarios have four at most.
const REQUESTS_PER_ENDPOINT: usize = 50;

#[test]
fn each_is_served_by_the_kernel() {
    let mut runs: BTreeMap<_, Vec<Scenario>> = BTreeMap::new();
    for it in scenarios::all() {
        runs.entry((it.node.clone(), it.service_proxy_name.clone())).or_default().push(it);
    }
    for ((name, service_proxy_name), scenarios) in runs {
        let Some(mut node) = TestNode::or_skip() else { return };
        NODE_ADDRESSES.iter().for_each(|it| node.netns().add_address(it.parse().unwrap()).unwrap());
        let arguments = service_proxy_name.iter().flat_map(|it| ["--service-proxy-name", it]);
        let binary = Build::Product.binary();
        let command = AgentCommand::run(&binary, node.sandbox(), &node.manifests(), &name).args(arguments);
        node.start_with(&command);
        let mut servers = BTreeMap::new();
        for scenario in &scenarios {
            for step in &scenario.steps {
                println!("{}: {}", scenario.name, step.about);
                check(&mut node, &mut servers, step);
            }
        }
    }
}

fn check(node: &mut TestNode, servers: &mut BTreeMap<SocketAddr, EchoServer>, step: &Step) {
    let answers = expected_answers(step);
    for (answer, _) in answers.values() {
        let Answer::Endpoints(endpoints) = answer else { continue };
        for endpoint in endpoints.iter().map(|it| it.parse::<SocketAddr>().unwrap()) {
            if !servers.keys().any(|it| it.ip() == endpoint.ip()) {
                node.netns().add_address(endpoint.ip()).unwrap();
            }
            let start = || EchoServer::start(&endpoint.to_string(), endpoint).unwrap();
            servers.entry(endpoint).or_insert_with(start);
        }
    }
    let before = node.log().len();
    node.write_file("all.json", &step.manifest());
    if let Some(expected) = step.dump() {
        let mut dump = Vec::new();
        let is_expected = eventually(TIMEOUT, || {
            dump = node.dump(Build::Product).unwrap_or_default();
            dump == expected
        });
        assert!(is_expected, "found {dump:#?} instead of {expected:#?}");
    }
    for (frontend, (answer, has_affinity)) in &answers {
        assert_answers(frontend, answer, *has_affinity);
        // What becomes of an address that no Service has depends on nftables.
        if *answer != Answer::Error("untranslated".into()) {
            assert_explained(node, frontend, answer);
        }
    }
    // The log has the first of many rejections.
    let is_reported = || {
        let log = node.log();
        let missing: Vec<_> = step.log.iter().filter(|it| !log[before..].contains(*it)).collect();
        missing.is_empty() || {
            let reasons = rejections(node);
            missing.iter().all(|text| reasons.iter().any(|it| it.contains(*text)))
        }
    };
    assert!(eventually(TIMEOUT, is_reported), "{:?} are not in\n{}", step.log, &node.log()[before..]);
    node.wait_until(|_| step.metrics.iter().all(|(series, value)| metric(series) == Some(*value)));
}

/// The rejections that `status` lists, as the log words them.
fn rejections(node: &TestNode) -> Vec<String> {
    let status = node.status_page("/status").map(|it| it.body).unwrap_or_default();
    let status: Value = serde_json::from_str(&status).unwrap_or_default();
    let text = |it: &Value| Some(format!("{}: {}", it["item"].as_str()?, it["reason"].as_str()?));
    status["rejected"].as_array().into_iter().flatten().filter_map(text).collect()
}

/// Who answers at each frontend, and whether each client has only one of them: what the dump says, and the step itself.
fn expected_answers(step: &Step) -> BTreeMap<String, (Answer, bool)> {
    let mut answers = BTreeMap::new();
    let dump = step.dump().unwrap_or_default();
    for line in &dump {
        let Some((frontend, rest)) = line.strip_prefix("frontend ").and_then(|it| it.split_once(' ')) else {
            continue;
        };
        let backends = dump.iter().filter_map(|it| it.strip_prefix(&format!("backend {frontend} -> ")));
        let backends: Vec<_> = backends.map(ToOwned::to_owned).collect();
        let answer =
            if backends.is_empty() { Answer::Error("refused".into()) } else { Answer::Endpoints(backends) };
        answers.insert(at_node_address(frontend), (answer, rest.contains("affinity=")));
    }
    answers.extend(step.answers.iter().map(|(it, answer)| (it.clone(), (answer.clone(), false))));
    answers
}

/// A node port's frontend at an address of the node; any other one as it is.
fn at_node_address(frontend: &str) -> String {
    let [v4, v6] = NODE_ADDRESSES;
    frontend.replace("0.0.0.0:", &format!("{v4}:")).replace("[::]:", &format!("[{v6}]:"))
}

#[track_caller]
fn assert_answers(frontend: &str, expected: &Answer, has_affinity: bool) {
    let (address, protocol) = frontend.split_once('/').unwrap();
    let transports: &[_] =
        if protocol == "TCP" { &[Transport::Tcp] } else { &[Transport::Udp, Transport::UdpUnconnected] };
    for transport in transports {
        assert_answers_over(*transport, address.parse().unwrap(), expected, has_affinity);
    }
}

/// `explain` names the endpoints that answer, and finds them in the kernel.
#[track_caller]
fn assert_explained(node: &TestNode, frontend: &str, expected: &Answer) {
    let explained = Explained::ask(&mut node.cli("explain"), &["node", frontend]);
    let (verdict, endpoints) = match expected {
        Answer::Endpoints(endpoints) => ("redirected", &endpoints[..]),
        Answer::Error(word) => (&**word, &[][..]),
    };
    assert_eq!(explained.verdict, verdict, "{explained:?}");
    let endpoints = endpoints.iter().map(|it| it.parse::<SocketAddr>().unwrap()).collect();
    assert_eq!(explained.used, endpoints, "{explained:?}");
}

#[track_caller]
fn assert_answers_over(transport: Transport, address: SocketAddr, expected: &Answer, has_affinity: bool) {
    let frontend = format!("{transport:?} {address}");
    let answer = || request(transport, address);
    match expected {
        Answer::Error(word) => {
            let kind = answer().expect_err(&frontend).kind();
            let found = match kind {
                ErrorKind::ConnectionRefused => "refused",
                // A program cannot choose another error there.
                ErrorKind::PermissionDenied if !kernel_at_least(5, 18) => "refused",
                ErrorKind::NetworkUnreachable => "untranslated",
                _ => &format!("{kind:?}"),
            };
            assert_eq!(found, word, "{frontend}");
        }
        Answer::Endpoints(endpoints) => {
            let expected: BTreeSet<_> = endpoints.iter().cloned().collect();
            let mut found = BTreeSet::new();
            for _ in 0..REQUESTS_PER_ENDPOINT * endpoints.len() {
                found.insert(answer().expect(&frontend));
                if found == expected {
                    return;
                }
            }
            let is_expected = has_affinity && found.len() == 1 && found.is_subset(&expected);
            assert!(is_expected, "{frontend}: {found:?} answered instead of {expected:?}");
        }
    }
}
