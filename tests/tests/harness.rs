//! The sandbox keeps its own promises.

use std::{net::SocketAddr, path::PathBuf, process::Command, time::Duration};

use tests::{
    ConnectLoad, EchoConnection, EchoServer, NetNs, Sandbox, Transport, connect_error, eventually,
    load::LoadReport, request, sandbox::remove_stale,
};

fn own_cgroup() -> String {
    let text = std::fs::read_to_string("/proc/self/cgroup").expect("/proc is mounted");
    text.lines().find_map(|it| it.strip_prefix("0::")).expect("cgroup2 is mounted").to_owned()
}

#[test]
fn a_sandbox_leaves_no_trace() {
    let Some(sandbox) = Sandbox::or_skip("a_sandbox_leaves_no_trace") else { return };
    let home = own_cgroup();
    let folders: Vec<PathBuf> = [sandbox.cgroup(), sandbox.pins(), sandbox.files()].map(Into::into).into();
    let inside = sandbox.enter().unwrap();
    assert!(own_cgroup().ends_with(sandbox.name()), "{} is not in {}", own_cgroup(), sandbox.name());
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    drop(inside);
    assert_eq!(own_cgroup(), home);

    drop(sandbox);
    assert!(child.wait().unwrap().code().is_none(), "the child is killed with its sandbox");
    for folder in folders {
        assert!(!folder.exists(), "{} stays", folder.display());
    }
}

#[test]
fn the_sandbox_of_the_dead_is_swept() {
    let Some(sandbox) = Sandbox::or_skip("the_sandbox_of_the_dead_is_swept") else { return };
    let machine = tests::requirements().unwrap();
    // No process has this id: it is above what the kernel gives out.
    let dead = machine.cgroup2.join("kpe-sandbox-gone-4194305");
    std::fs::create_dir(&dead).unwrap();
    assert_eq!(remove_stale(&machine, false), ["kpe-sandbox-gone-4194305"]);
    assert!(!dead.exists());
    assert!(sandbox.cgroup().exists());
}

#[test]
fn a_namespace_has_only_its_own_addresses() {
    let Some(_sandbox) = Sandbox::or_skip("a_namespace_has_only_its_own_addresses") else { return };
    let namespace = NetNs::new().unwrap();
    let _inside = namespace.enter().unwrap();
    // Addresses are not used again: the kernel forgets the routes of one that is removed some time later.
    for (ip, transport) in [
        ("10.244.0.1", Transport::Tcp),
        ("10.244.0.2", Transport::Udp),
        ("10.244.0.3", Transport::UdpUnconnected),
        ("fd00:10:244::1", Transport::Tcp),
        ("fd00:10:244::2", Transport::Udp),
        ("fd00:10:244::3", Transport::UdpUnconnected),
    ] {
        let address = SocketAddr::new(ip.parse().unwrap(), 8080);
        assert!(request(transport, address).is_err(), "{address} answers before it is there");
        namespace.add_address(address.ip()).unwrap();
        let server = EchoServer::start("web-1", address).unwrap();
        // There was a route a moment ago; but on a busy machine the kernel may still be taking away the one before.
        let mut answer = None;
        let is_answered = eventually(Duration::from_secs(5), || {
            answer = Some(request(transport, address));
            answer.as_ref().is_some_and(Result::is_ok)
        });
        assert!(is_answered, "{address}: {answer:?}");
        assert_eq!(answer.unwrap().unwrap(), "web-1");
        drop(server);
        namespace.remove_address(address.ip()).unwrap();
    }
    // A service address has no route: an untranslated connect fails at once.
    let (error, took) = connect_error("10.96.0.1:80".parse().unwrap()).unwrap();
    assert!(took < Duration::from_millis(500), "{error} took {took:?}");
}

#[test]
fn a_probe_outlives_other_connections() {
    let server = EchoServer::start("echo", "127.0.0.1:0".parse().unwrap()).unwrap();
    let mut probe = EchoConnection::connect(server.address()).unwrap();
    let load = ConnectLoad::start(Transport::Tcp, server.address(), 4, Duration::ZERO);
    assert!(eventually(Duration::from_secs(5), || load.count() > 1000));
    probe.ping().unwrap();
    let samples = load.stop();
    probe.ping().unwrap();

    let report = LoadReport::of(&samples);
    assert_eq!((report.failed, report.by["echo"]), (0, report.connects), "{:?}", report.errors);
    assert!(report.p50 <= report.p99 && report.p99 <= report.max);
    drop(server);
    assert!(probe.ping().is_err());
}
