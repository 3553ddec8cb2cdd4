//! The harness itself.

use std::{net::SocketAddr, path::PathBuf, process::Command, time::Duration};

use aya::maps::{Array, MapData};
use tests::{
    ConnectLoad, EchoConnection, EchoServer, NetNs, ObjectTracker, Sandbox, TIMEOUT, Transport,
    connect_error, eventually, kernel_objects::ObjectKind, load::LoadReport, request, requirements,
    sandbox::remove_stale, skip::current_test,
};

fn own_cgroup() -> String {
    let text = std::fs::read_to_string("/proc/self/cgroup").expect("/proc is mounted");
    text.lines().find_map(|it| it.strip_prefix("0::")).expect("cgroup2 is mounted").to_owned()
}

#[test]
fn a_test_knows_its_name() {
    assert_eq!(current_test(), "a_test_knows_its_name");
}

#[test]
fn a_sandbox_leaves_no_trace() {
    let Some(sandbox) = Sandbox::or_skip() else { return };
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
        assert!(!folder.exists(), "{} is left", folder.display());
    }
}

#[test]
fn the_sandbox_of_an_ended_process_is_removed() {
    let Some(sandbox) = Sandbox::or_skip() else { return };
    let host = requirements().unwrap();
    // No process has this id: it is above the kernel's limit.
    let stale = host.cgroup2.join("kpe-sandbox-gone-4194305");
    std::fs::create_dir(&stale).unwrap();
    // There may be others: of tests that have failed.
    assert!(remove_stale(&host, false).iter().any(|it| it == "kpe-sandbox-gone-4194305"));
    assert!(!stale.exists());
    assert!(sandbox.cgroup().exists());
}

#[test]
fn kernel_objects_of_a_sandbox_are_counted_and_leaks_are_found() {
    let Some(sandbox) = Sandbox::or_skip() else { return };
    let mut objects = ObjectTracker::new(&sandbox);
    let before = objects.counts();
    let mut with_map = before.clone();
    *with_map.entry(ObjectKind::Map).or_default() += 1;
    let pin = sandbox.pins().join("map");
    let elsewhere = sandbox.pins().with_file_name(format!("{}-leak", sandbox.name()));
    let map = Array::<_, u32>::create(1, 0).unwrap();
    assert_eq!(objects.counts(), with_map, "held open by this process");
    map.pin(&pin).unwrap();
    assert_eq!(objects.counts(), with_map, "pinned");
    assert!(objects.leaked().is_empty());
    // A pin outside the sandbox stands for any reference that is not the sandbox's.
    MapData::from_pin(&pin).unwrap().pin(&elsewhere).unwrap();
    std::fs::remove_file(&pin).unwrap();
    assert_eq!(objects.counts(), before);
    assert_eq!(objects.leaked().iter().map(|it| it.0).collect::<Vec<_>>(), [ObjectKind::Map]);
    std::fs::remove_file(elsewhere).unwrap();
    assert!(eventually(TIMEOUT, || objects.leaked().is_empty()));
}

#[test]
fn a_namespace_has_only_its_own_addresses() {
    let Some(_sandbox) = Sandbox::or_skip() else { return };
    let namespace = NetNs::new().unwrap();
    let _inside = namespace.enter().unwrap();
    // Each address is used once: the kernel removes the routes of a removed address asynchronously.
    for (ip, transport) in [
        ("10.244.0.1", Transport::Tcp),
        ("10.244.0.2", Transport::Udp),
        ("10.244.0.3", Transport::UdpUnconnected),
        ("fd00:10:244::1", Transport::Tcp),
        ("fd00:10:244::2", Transport::Udp),
        ("fd00:10:244::3", Transport::UdpUnconnected),
    ] {
        let address = SocketAddr::new(ip.parse().unwrap(), 8080);
        assert!(request(transport, address).is_err(), "{address} replies before it was added");
        namespace.add_address(address.ip()).unwrap();
        let server = EchoServer::start("web-1", address).unwrap();
        // On a busy machine the kernel may still be removing the route of the previous address.
        let mut reply = None;
        let has_reply = eventually(TIMEOUT, || {
            reply = Some(request(transport, address));
            reply.as_ref().is_some_and(Result::is_ok)
        });
        assert!(has_reply, "{address}: {reply:?}");
        assert_eq!(reply.unwrap().unwrap(), "web-1");
        drop(server);
        namespace.remove_address(address.ip()).unwrap();
    }
    // A Service's address has no route: an untranslated connect fails at once.
    let (error, duration) = connect_error("10.96.0.1:80".parse().unwrap()).unwrap();
    assert!(duration < TIMEOUT, "{error} after {duration:?}");
}

#[test]
fn a_connection_outlives_a_load() {
    let server = EchoServer::start("echo", "127.0.0.1:0".parse().unwrap()).unwrap();
    let mut connection = EchoConnection::connect(server.address()).unwrap();
    let load = ConnectLoad::start(Transport::Tcp, server.address(), 4, Duration::ZERO);
    assert!(eventually(TIMEOUT, || load.count() > 1000));
    connection.ping().unwrap();
    let samples = load.stop();
    connection.ping().unwrap();

    let report = LoadReport::of(&samples);
    assert_eq!((report.failed, report.by_server["echo"]), (0, report.connects), "{:?}", report.errors);
    assert!(report.p50 <= report.p99 && report.p99 <= report.max);
    drop(server);
    assert!(connection.ping().is_err());
}
