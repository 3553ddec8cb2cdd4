//! Sockets keep their translation across an upgrade to another map layout and back.

use std::{
    env, fs,
    net::{SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    time::Duration,
};

use aya::maps::MapData;
use tests::{
    AgentCommand, Build, ConnectLoad, EchoConnection, FRONTEND, Service, TIMEOUT, TestNode, Transport, WEB,
    assert_contains, client::receive, expected_dump, request, run, scaled, udp_socket, web, web4,
};

/// A UDP socket whose replies must all come from the same endpoint, with the Service's address.
pub(super) struct Flow {
    socket: UdpSocket,
    service: SocketAddr,
    is_connected: bool,
    server: Option<String>,
}

impl Flow {
    pub(super) fn new(service: SocketAddr, is_connected: bool) -> Self {
        let socket = udp_socket(service).unwrap();
        if is_connected {
            socket.connect(service).unwrap();
        }
        Self { socket, service, is_connected, server: None }
    }

    fn send(&self) {
        let Self { socket, service, .. } = self;
        if self.is_connected { socket.send(b"who?") } else { socket.send_to(b"who?", service) }.unwrap();
    }

    #[track_caller]
    fn receive(&mut self, when: &str) {
        let received = receive(&self.socket);
        let (name, from) = received.unwrap_or_else(|error| panic!("{} {when}: {error}", self.service));
        assert_eq!(from, self.service, "the source of a reply, {when}");
        let before = self.server.get_or_insert_with(|| name.clone());
        assert_eq!(*before, name, "the server of a flow, {when}");
    }

    #[track_caller]
    pub(super) fn exchange(&mut self, when: &str) {
        self.send();
        if self.is_connected {
            assert_eq!(self.socket.peer_addr().unwrap(), self.service, "{when}");
        }
        self.receive(when);
    }
}

#[track_caller]
fn start(node: &mut TestNode, build: Build, services: &[Service]) {
    // The log says that the state is active after the links were switched and the previous layout was removed.
    node.start_with(&node.command(build));
    assert_eq!(node.dump(build).unwrap(), expected_dump(services), "{}", node.log());
}

#[track_caller]
pub(super) fn check(connections: &mut [(EchoConnection, SocketAddr)], when: &str) {
    for (connection, service) in connections {
        connection.ping().unwrap_or_else(|error| panic!("a connection to {service} broke {when}: {error}"));
        assert_eq!(connection.stream().peer_addr().unwrap(), *service, "{when}");
    }
}

/// What must survive, of each family: connections, flows that are connected or not, and those that connect all the time.
fn connect(
    services: [SocketAddr; 2],
    flows: &[bool],
    loads: &[Transport],
) -> ([(EchoConnection, SocketAddr); 2], Vec<Flow>, Vec<ConnectLoad>) {
    let connections = services.map(|it| (EchoConnection::connect(it).unwrap(), it));
    let flows =
        services.into_iter().flat_map(|it| flows.iter().map(move |connected| Flow::new(it, *connected)));
    let mut flows: Vec<_> = flows.collect();
    flows.iter_mut().for_each(|it| it.exchange("at first"));
    let interval = scaled(Duration::from_millis(1));
    let loads = loads.iter().zip(services.into_iter().cycle());
    let loads = loads.map(|(by, address)| ConnectLoad::start(*by, address, 1, interval));
    (connections, flows, loads.collect())
}

#[test]
fn upgrade_keeps_sockets() {
    let Some(mut node) = TestNode::or_skip() else { return };
    let [service, service6] = WEB.map(|it| SocketAddr::new(it, 80));
    node.serve(1..=5);
    let services = [web(1..=5)];
    node.write(&services);
    start(&mut node, Build::Failpoints, &services);
    assert_eq!(node.layouts(), [Build::Failpoints.layout()]);

    let transports = [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected];
    let (mut connections, mut flows, loads) =
        connect([service, service6], &[true, false, false], &transports);

    let [layout, next_layout] = [Build::Failpoints, Build::NextLayout].map(Build::layout);
    for build in [Build::NextLayout, Build::Failpoints, Build::NextLayout, Build::Failpoints] {
        // A reply to a request that was sent before the upgrade arrives after it.
        let mut pending = Flow::new(service, false);
        pending.send();
        node.kill();
        start(&mut node, build, &services);
        let when = format!("on layout {}", build.layout());
        assert_eq!(node.layouts(), [build.layout()], "the other layout is removed");
        pending.receive(&when);
        check(&mut connections, &when);
        flows.iter_mut().for_each(|it| it.exchange(&when));
    }

    // After a crash between two links, some programs are of one layout, some of the other.
    node.kill();
    node.start_inactive(&node.command(Build::NextLayout).env("KUBE_PROXY_EBPF_FAULT", "half-attached"));
    node.agent_mut().wait(TIMEOUT).unwrap();
    assert_eq!(node.layouts(), [next_layout, layout]);
    flows.iter_mut().for_each(|it| it.exchange("between two layouts"));
    start(&mut node, Build::Failpoints, &services);
    assert_eq!(node.layouts(), [layout]);
    flows.iter_mut().for_each(|it| it.exchange("at the end"));
    check(&mut connections, "at the end");

    for load in loads {
        load.stop_without_failure(100);
    }
}

/// As in a cluster: each binary is that of its release, under the capabilities and the seccomp profile of the manifests.
#[test]
#[ignore = "needs the binaries of two releases: `cargo xtask release --previous ARCHIVE` runs it"]
fn sockets_are_kept_by_an_upgrade_from_the_previous_release() {
    let binary = |variable: &str| PathBuf::from(env::var_os(variable).expect("the binary of a release"));
    let previous = binary("KUBE_PROXY_EBPF_PREVIOUS_RELEASE");
    let this = binary("KUBE_PROXY_EBPF_THIS_RELEASE");
    let Some(mut node) = TestNode::or_skip() else { return };
    let addresses = WEB.map(|it| SocketAddr::new(it, 80));
    node.serve(1..=5);
    node.write(&[web(1..=4)]);
    let start = |node: &mut TestNode, binary: &Path| {
        node.start_with(&AgentCommand::run(binary, node.sandbox(), &node.manifests(), "n1"));
    };
    start(&mut node, &previous);

    let (mut connections, mut flows, loads) =
        connect(addresses, &[true, false], &[Transport::Tcp, Transport::Udp]);
    for (binary, when) in
        [(&this, "after the upgrade"), (&previous, "after the downgrade"), (&this, "at the end")]
    {
        node.kill();
        start(&mut node, binary);
        check(&mut connections, when);
        flows.iter_mut().for_each(|it| it.exchange(when));
    }
    // What the previous release has left is not in the way of changes. The tests' own binaries need not be built here.
    node.write(&[web(1..=5)]);
    node.wait_until(|_| request(Transport::Tcp, addresses[0]).is_ok_and(|it| it == "web-5"));
    check(&mut connections, "after a change");
    for load in loads {
        load.stop_without_failure(100);
    }
}

#[test]
fn hooks_of_a_later_version_are_removed_by_a_downgrade_and_by_cleanup() {
    let Some(mut node) = TestNode::serving_or_skip([1, 2]) else { return };
    let links = node.sandbox().pins().join("links");
    // A link with a name that the older version does not know, whose program uses the later version's maps.
    let rename = || fs::rename(links.join("connect4"), links.join("later4")).unwrap();

    node.write(&[web4([1])]);
    start(&mut node, Build::NextLayout, &[web4([1])]);
    node.kill();
    rename();
    node.write(&[web4([2])]);
    start(&mut node, Build::Failpoints, &[web4([2])]);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-2", "no program uses the previous maps");
    assert!(!links.join("later4").exists(), "{:?}", node.pins());
    node.wait_until_logged(&["program of another version detached hook=later4"]);
    node.kill();

    rename();
    let no_link = links.join("no_link");
    MapData::from_pin(node.program("").join("../active")).unwrap().pin(&no_link).unwrap();
    let stderr = run(&mut node.cli("cleanup")).exits_with(0);
    assert_contains(&stderr, &["kept: it does not belong", "links/no_link"]);
    assert_eq!(node.pins(), ["/links/no_link"]);
    assert!(request(Transport::Tcp, FRONTEND).is_err(), "no hook is left");
}
