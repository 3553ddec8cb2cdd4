//! `trace` on a node: each connect of a load is a line and nothing else is, and each filter lets through what it names.

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, BufReader, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::net::UnixStream,
    process::{self, Command},
    thread,
    time::Duration,
};

use aya::programs::{ProgramInfo, links::PinnedLink, loaded_programs};
use build_tools::command::KilledOnDrop;
use serde_json::Value;
use tests::{
    Attack, BlackHole, EchoConnection, FRONTEND, NetNs, Pod, Service, TARGET_PORT, TIMEOUT, TestNode, Trace,
    Transport, WEB, WEB4, assert_contains, count_each, endpoint, eventually, exchange, kernel_at_least,
    request, reset_on_close, run, skip, status_socket, udp_socket, web, web4,
};

use super::{
    exclusion::{ChildCgroup, leave},
    pod_annotations,
};

/// The hooks whose programs a trace replaces.
const TRACED: [&str; 6] = ["sock_release", "sock_ops", "sendmsg4", "sendmsg6", "connect4", "connect6"];
pub(super) const OTHER4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 20);

#[track_caller]
pub(super) fn start(node: &TestNode, arguments: &[&str]) -> Trace {
    Trace::start(node.cli("trace").args(arguments))
}

#[track_caller]
pub(super) fn refused(node: &TestNode, arguments: &[&str]) -> String {
    run(node.cli("trace").args(arguments)).exits_with(1)
}

pub(super) fn node_or_skip(services: &[Service]) -> Option<TestNode> {
    TestNode::running_or_skip([1, 2], services, &[])
}

/// The Service `other` with IPv4 and TCP only.
pub(super) fn other4(endpoints: impl IntoIterator<Item = u8>) -> Service {
    Service::new("other", &[OTHER4.into()]).port("http", "TCP", 80, TARGET_PORT).endpoints(endpoints)
}

/// The id of the program under a hook's link, and that of the product's.
fn programs(node: &TestNode, hook: &str) -> (u32, u32) {
    let link = PinnedLink::from_pin(node.sandbox().pins().join("links").join(hook)).unwrap();
    let linked = aya::programs::links::FdLink::from(link).info().unwrap().program_id();
    (linked, ProgramInfo::from_pin(node.program(hook)).unwrap().id())
}

/// Whether the programs under the links are the product's, byte for byte: the same programs as at the start.
pub(super) fn are_products(node: &TestNode) -> bool {
    TRACED.iter().all(|hook| {
        let (linked, product) = programs(node, hook);
        linked == product
    })
}

#[test]
fn every_connect_is_traced_and_nothing_else() {
    const THREADS: usize = 4;
    const REQUESTS: usize = 50;
    let Some(mut node) = node_or_skip(&[web([1, 2]), other4([1])]) else { return };
    assert!(are_products(&node));
    let trace = start(&node, &[]);
    assert!(!are_products(&node));
    // While the agent checks and probes its programs.
    node.wait_until_ready();
    let load = || {
        let addresses = (0..REQUESTS).map(|n| SocketAddr::new(WEB[n % 2], 80));
        let requests = addresses.flat_map(|address| Transport::ALL.map(|it| (it, address)));
        requests.map(|(transport, address)| request(transport, address).unwrap()).collect::<Vec<_>>()
    };
    let replies = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(load)).collect();
        count_each(threads.into_iter().flat_map(|it| it.join().unwrap()))
    });
    drop(EchoConnection::connect((OTHER4, 80).into()).unwrap());
    let lines = trace.until((OTHER4, 80).into());
    assert_eq!(lines.len(), THREADS * REQUESTS * Transport::ALL.len(), "{:?}", lines.first());
    #[track_caller]
    fn text<'a>(line: &'a Value, field: &str) -> &'a str {
        line[field].as_str().unwrap_or_else(|| panic!("{field} of {line}"))
    }
    for line in &lines {
        assert_eq!((text(line, "service"), text(line, "verdict")), ("default/web", "redirected"));
        assert_eq!(text(line, "protocol").to_lowercase(), text(line, "port"));
        assert_eq!(line["pid"], process::id());
        assert!(text(line, "cgroup").ends_with(node.sandbox().name()), "{line}");
    }
    let server = |line: &Value| {
        let address: SocketAddr = text(line, "endpoint").parse().unwrap();
        let n = (1..=2).find(|n| endpoint(*n).contains(&address.ip())).unwrap();
        format!("web-{n}")
    };
    assert_eq!(count_each(lines.iter().map(server)), replies, "the endpoints are those that have replied");
    let each = THREADS * REQUESTS;
    let count = |field| count_each(lines.iter().map(|it| text(it, field)));
    assert_eq!(count("event"), BTreeMap::from([("connect", 2 * each), ("send", each)]));
    assert_eq!(count("port"), BTreeMap::from([("tcp", each), ("udp", 2 * each)]));
    let status = run(&mut node.cli("status")).stdout;
    assert_contains(&status, &["\ntrace      runs since 2", "attached at all 12 hooks"]);
    drop(trace);
    assert!(eventually(TIMEOUT, || are_products(&node)));
    assert!(!run(&mut node.cli("status")).stdout.contains("trace  "));
    assert!(!node.log().contains("foreign program"), "{}", node.log());
}

#[test]
fn what_is_not_redirected_is_traced_with_its_reason() {
    let Some(mut node) = TestNode::prepared_or_skip([1], &[web4([1]), other4([])]) else { return };
    let excluded = ChildCgroup::new(node.sandbox(), "excluded");
    pod_annotations::write(&node, &[(1, "off")]);
    let _kubelets = pod_annotations::kubelets(node.sandbox());
    let pod = pod_annotations::cgroup_of(node.sandbox(), 1);
    node.start(&["--socket-lb-exclude-cgroup", excluded.path(), pod_annotations::FLAG]);
    let trace = start(&node, &[]);
    assert_eq!(TcpStream::connect((OTHER4, 80)).unwrap_err().raw_os_error(), Some(nix::libc::ECONNREFUSED));
    let expect = [("verdict", "noEndpoints"), ("service", "default/other"), ("port", "http")];
    let line = trace.expect(&expect);
    assert!(line["endpoint"].is_null(), "{line}");

    // The network is known, the address is not.
    TcpStream::connect((Ipv4Addr::new(10, 96, 0, 99), 80)).unwrap_err();
    let line = trace.expect(&[("verdict", "passed"), ("destination", "10.96.0.99:80")]);
    assert!(line["service"].is_null(), "{line}");

    // The endpoint itself is in no network of Services.
    drop(TcpStream::connect((endpoint(1)[0], TARGET_PORT)).unwrap());
    drop(EchoConnection::connect(FRONTEND).unwrap());
    assert_eq!(trace.next()["verdict"], "redirected");
    for cgroup in [&excluded, &pod] {
        cgroup.enter();
        TcpStream::connect(FRONTEND).unwrap_err();
        leave(&node);
        let line = trace.expect(&[("verdict", "excluded"), ("destination", "10.96.0.10:80")]);
        assert!(line["endpoint"].is_null(), "{line}");
    }
    drop(trace);

    // Every destination, and every datagram, on request.
    let trace = start(&node, &["--all"]);
    drop(TcpStream::connect((endpoint(1)[0], TARGET_PORT)).unwrap());
    let passed = SocketAddr::new(endpoint(1)[0], TARGET_PORT);
    assert!(trace.until(passed).is_empty());
}

#[test]
fn a_filter_lets_through_what_it_names() {
    let client = "10.244.9.9".parse().unwrap();
    let clients = Service::new("clients", &[IpAddr::from([10, 96, 0, 40])]);
    let clients = clients.port("", "TCP", 80, TARGET_PORT).endpoint("client", &[client]);
    let Some(node) = node_or_skip(&[web4([1]), other4([2]), clients]) else { return };
    let (web, other) = (FRONTEND, SocketAddr::from((OTHER4, 80)));
    let connect = |to| drop(EchoConnection::connect(to).unwrap());
    let own = process::id().to_string();
    let from_pod = || Pod::attack(node.sandbox(), "pod", &Attack::connect_tcp(1, other)).unwrap();
    #[track_caller]
    fn check(node: &TestNode, arguments: &[&str], before: impl Fn(), wanted: impl Fn(), expect: SocketAddr) {
        let trace = start(node, arguments);
        before();
        wanted();
        let line = trace.next();
        assert_eq!(line["destination"], expect.to_string(), "{arguments:?}: {line}");
    }
    check(&node, &["--service", "default/web"], || connect(other), || connect(web), web);
    check(&node, &["--to", "10.96.0.10"], || connect(other), || connect(web), web);
    check(&node, &["--to", "10.96.0.20:80"], || connect(web), || connect(other), other);
    let of_endpoint = format!("{}:{TARGET_PORT}", endpoint(2)[0]);
    check(&node, &["--to", &of_endpoint], || connect(web), || connect(other), other);
    check(&node, &["--pid", &own], || drop(from_pod()), || connect(web), web);

    // Of a cgroup below, not of one beside it.
    let uid = "3f2a8d1c-0b4e-4c7d-9a51-6d2f1e0c9b8a";
    for (name, is_pod) in [("pod".to_owned(), false), (format!("pod{uid}"), true)] {
        let cgroup = ChildCgroup::new(node.sandbox(), &name);
        let filter = if is_pod { ["--pod", uid] } else { ["--cgroup", cgroup.path()] };
        // The plugin knows the names of pods.
        let (input, mut names) = io::pipe().unwrap();
        writeln!(names, "{uid} default/client").unwrap();
        let trace = Trace::start(node.cli("trace").args(filter).stdin(input));
        connect(web);
        cgroup.enter();
        connect(other);
        leave(&node);
        let line = trace.next();
        assert_eq!(line["destination"], other.to_string(), "{filter:?}: {line}");
        assert_eq!(line["podUid"].as_str(), is_pod.then_some(uid), "{line}");
        assert_eq!(line["pod"].as_str(), is_pod.then_some("default/client"), "{line}");
    }

    // Of a pod by its name, which stands for a network namespace. Before, these have no cookies for user space.
    if !kernel_at_least(5, 14) {
        return;
    }
    let pod = NetNs::with_local_endpoints().unwrap();
    pod.add_address(client).unwrap();
    let error = refused(&node, &["--pod", "default/client"]);
    assert_contains(&error, &["no network namespace on this node has an address of the pod"]);
    let _process = KilledOnDrop(pod.run(|| Command::new("sleep").arg("infinity").spawn().unwrap()));
    let trace = start(&node, &["--pod", "default/client"]);
    connect(web);
    // Nothing listens in the pod's network namespace.
    pod.run(|| TcpStream::connect(other).unwrap_err());
    trace.expect(&[("destination", "10.96.0.20:80")]);
    assert_contains(&refused(&node, &["--pod", "default/none"]), &["no endpoint is of a pod default/none"]);
}

#[test]
fn replies_of_a_server_are_no_failures_of_services() {
    // An address in the network of the Services, as where nodes have some.
    let client = Ipv4Addr::new(10, 96, 7, 7);
    let Some(node) = node_or_skip(&[web4([1])]) else { return };
    node.netns().add_address(client.into()).unwrap();
    let trace = start(&node, &[]);
    let client = UdpSocket::bind((client, 0)).unwrap();
    let server = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    server.send_to(b"a reply", client.local_addr().unwrap()).unwrap();
    // Where a Service is, but not this port, that is what is looked for. There is no route to it.
    server.send_to(b"a question", (WEB4, 81)).unwrap_err();
    let reason = ("reason", "default/web has no such port: it has 80/TCP");
    trace.expect(&[("event", "send"), ("destination", "10.96.0.10:81"), reason]);
}

#[test]
fn failures_alone_are_traced_on_request() {
    // Endpoint 3 has no server.
    let down = Service::new("down", &[IpAddr::from([10, 96, 0, 30])]).port("", "TCP", 80, TARGET_PORT);
    let Some(node) = node_or_skip(&[web4([1]), other4([]), down.endpoints([3])]) else { return };
    let trace = start(&node, &["--failed"]);
    drop(EchoConnection::connect(FRONTEND).unwrap());
    TcpStream::connect((OTHER4, 80)).unwrap_err();
    assert_eq!(trace.next()["verdict"], "noEndpoints");
    drop(EchoConnection::connect(FRONTEND).unwrap());
    TcpStream::connect(("10.96.0.30", 80)).unwrap_err();
    let expect = [("event", "end"), ("end", "refused"), ("service", "default/down"), ("port", "80")];
    let line = trace.expect(&expect);
    // An endpoint is not.
    drop(TcpStream::connect((endpoint(1)[0], TARGET_PORT)).unwrap());
    TcpStream::connect((WEB4, 81)).unwrap_err();
    let reason = ("reason", "default/web has no such port: it has 80/TCP");
    trace.expect(&[("verdict", "passed"), ("destination", "10.96.0.10:81"), reason]);
    let text = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes}\n\
                spec: {cidrs: [10.96.0.0/16]}\n";
    node.write_file("service-cidr.yaml", text);
    let is_known = || {
        TcpStream::connect("10.96.0.99:80").unwrap_err();
        TcpStream::connect((OTHER4, 80)).unwrap_err();
        let line = trace.next();
        let is_known = line["destination"] == "10.96.0.99:80";
        assert_eq!(is_known, line["reason"] == "no Service has this cluster IP", "{line}");
        is_known
    };
    assert!(eventually(TIMEOUT, is_known));
    assert!(line["seconds"].as_f64().is_some() && line["establishedSeconds"].is_null(), "{line}");
}

#[test]
fn the_end_of_each_connection_is_traced_on_request() {
    let Some(node) = node_or_skip(&[other4([1]), web4([3])]) else { return };
    let trace = start(&node, &["--close"]);
    let connection = TcpStream::connect((OTHER4, 80)).unwrap();
    let begin = trace.expect(&[("event", "connect")]);
    thread::sleep(Duration::from_secs(1));
    drop(connection);
    let line = trace.expect(&[("event", "end"), ("end", "closed"), ("destination", "10.96.0.20:80")]);
    // To the second, as in 2026-01-02T03:04:05.
    let [from, to] = [&begin, &line].map(|it| &it["time"].as_str().unwrap()[..19]);
    assert!(from < to, "{begin}, {line}");
    let [established, after] = ["establishedSeconds", "seconds"].map(|it| line[it].as_f64().unwrap());
    assert!(0.0 < established && established <= after, "{line}");
    // The server closes when the client has shut down its side: that counts as closed by the client.
    let connection = TcpStream::connect((OTHER4, 80)).unwrap();
    connection.shutdown(std::net::Shutdown::Write).unwrap();
    let _ = (&connection).read_to_end(&mut Vec::new());
    drop(connection);
    let end = || {
        trace.expect(&[("event", "connect")]);
        let line = trace.expect(&[("event", "end")]);
        (line["end"].as_str().unwrap().to_owned(), line["establishedSeconds"].is_f64())
    };
    assert_eq!(end(), ("closed".into(), true));

    node.netns().set_sysctl("ipv4/tcp_syn_retries", "1").unwrap();
    // This test is the endpoint.
    let listener = TcpListener::bind((endpoint(3)[0], TARGET_PORT)).unwrap();
    let mut client = TcpStream::connect(FRONTEND).unwrap();
    let (server, _) = listener.accept().unwrap();
    reset_on_close(&server).unwrap();
    drop(server);
    let error = client.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    drop(client);
    assert_eq!(end(), ("reset".into(), true));

    let mut client = TcpStream::connect(FRONTEND).unwrap();
    drop(listener.accept().unwrap());
    client.read_to_end(&mut Vec::new()).unwrap();
    drop(client);
    assert_eq!(end(), ("closedByEndpoint".into(), true));

    drop(listener);
    let _hole = BlackHole::at((endpoint(3)[0], TARGET_PORT).into());
    let error = TcpStream::connect(FRONTEND).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(end(), ("noAnswer".into(), false));
    // It closes the socket.
    let error = TcpStream::connect_timeout(&FRONTEND, Duration::from_millis(100)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(end(), ("givenUp".into(), false));
}

/// Begins a trace, and sends this many datagrams while its lines are not read; returns what reads the next line.
pub(super) fn unread_trace(node: &TestNode, query: &str, datagrams: usize) -> impl FnMut() -> Option<Value> {
    let mut reader = UnixStream::connect(status_socket(node.sandbox())).unwrap();
    write!(reader, "GET /trace?{query} HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    let mut reader = BufReader::new(reader);
    let mut line = String::new();
    let mut next = move || {
        line.clear();
        reader.read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).ok()
    };
    while next().is_none_or(|it| it["event"] != "started") {}
    let socket = udp_socket(FRONTEND).unwrap();
    exchange(&socket, FRONTEND).unwrap();
    for _ in 1..datagrams {
        socket.send_to(b"who?", FRONTEND).unwrap();
    }
    next
}

#[test]
fn lost_events_are_counted() {
    const SENT: usize = 40_000;
    let Some(node) = node_or_skip(&[web([1])]) else { return };
    let mut next = unread_trace(&node, "all&to=10.96.0.10:80", SENT);
    let (mut events, mut lost) = (0, 0);
    while events + lost < SENT {
        let Some(line) = next() else { continue };
        match line["event"].as_str().unwrap() {
            "lost" => {
                lost += line["count"].as_u64().unwrap() as usize;
                assert_eq!(line["total"], lost);
            }
            _ => events += 1,
        }
    }
    assert_eq!(events + lost, SENT);
    assert!(lost > 0 && events > 8_000, "{events} events, {lost} lost");
}

/// See `programs_stay_far_below_the_verifier_limit`; those that report are larger.
#[test]
fn traced_programs_stay_far_below_the_verifier_limit() {
    let Some(node) = node_or_skip(&[web([1])]) else { return };
    for arguments in [
        &[][..],
        &["--close"],
        &["--failed", "--all", "-vv"],
        &["--service", "default/web", "--pid", "1", "--to", "::1"],
    ] {
        let _trace = start(&node, arguments);
        for hook in TRACED {
            let (linked, _) = programs(&node, hook);
            let program = loaded_programs().flatten().find(|it| it.id() == linked).unwrap();
            let Some(instructions) = program.verified_instruction_count() else {
                return skip("this kernel does not report the number of verified instructions (Linux 5.16)");
            };
            println!("{hook} {arguments:?}: {instructions}");
            assert!((1..200_000).contains(&instructions), "{hook}: {instructions}");
        }
    }
}
