//! Measures what the nftables backend costs, in a network namespace of its own, and prints the figures as JSON (as root).
//!
//! Invariant: the measured interval is what a node does, from a state to active tables.
//!
//! `bench_nft SERVICES ENDPOINTS CHANGES AFFINITY`, the last one in seconds, 0 for none; `cargo xtask bench nft` runs it and sets the figures beside the goals.

#![expect(clippy::unwrap_used, reason = "a measurement that cannot go on fails")]

use std::{
    net::{IpAddr, Ipv4Addr},
    num::{NonZeroU16, NonZeroU32},
    time::{Duration, Instant},
};

use datapath_nft::{self as nft, Config, Options};
use ipnet::IpNet;
use model::{
    Protocol, ServiceName,
    state::{
        ClientIpAffinity, Endpoint, EndpointKey, EndpointPort, NodeState, PerFamily, Scopes, Service,
        ServicePort, ServiceState, TargetPort,
    },
};
use nix::sched::{CloneFlags, unshare};

/// An address within 10.`net`.0.0/14.
fn address(net: u8, n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from_be_bytes([10, net, 0, 0]) + 1 + n)
}

/// Service number `n`, with endpoints that no other Service has.
fn service(n: u32, endpoints: u32, affinity: u32) -> ServiceState {
    let port = |it| NonZeroU16::new(it).unwrap();
    let scopes = Scopes { internal: true, external: false, cluster: true };
    let service = Service {
        cluster_ips: vec![IpAddr::V4(address(96, n))],
        ports: vec![ServicePort {
            target_port: TargetPort::Number(port(8080)),
            has_any_endpoint: PerFamily { v4: true, v6: false },
            ..ServicePort::new(Protocol::Tcp, port(80))
        }],
        affinity: NonZeroU32::new(affinity).map(|timeout_seconds| ClientIpAffinity { timeout_seconds }),
        ..Service::new(ServiceName::new(format!("namespace-{}", n % 100), format!("service-{n}")))
    };
    let endpoint = |it: u32| Endpoint {
        v4: Some(address(128, n * 100 + it)),
        local: it == 0,
        ports: [EndpointPort { index: 0, port: port(8080), scopes }].into(),
        ..Endpoint::new(EndpointKey::Pod(format!("pod-{n}-{it}").into()))
    };
    ServiceState::new(service, (0..endpoints).map(endpoint))
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    millis(times[times.len() / 2])
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn main() {
    let numbers: Vec<u32> = std::env::args().skip(1).map(|it| it.parse().unwrap()).collect();
    let [services, endpoints, changes, affinity] = numbers[..] else {
        panic!("bench_nft SERVICES ENDPOINTS CHANGES AFFINITY")
    };
    // Nothing outside is touched, and nothing stays.
    unshare(CloneFlags::CLONE_NEWNET).unwrap();

    let config = Config { masquerade_bit: 14, ..Config::default() };
    let options = Options { node_name: "node".into(), config, ..Options::default() };
    let start = || nft::Datapath::start(&options).unwrap();

    let mut state = NodeState::default();
    for n in 0..services {
        state.services.insert(service(n, endpoints, affinity));
    }
    let began = Instant::now();
    let mut backend = start();
    backend.apply(&state).unwrap();
    let load = began.elapsed();

    let mut one_service = Vec::new();
    let mut one_endpoint = Vec::new();
    for n in 0..changes {
        state.services.insert(service(services + n, endpoints, affinity));
        let began = Instant::now();
        let report = backend.apply(&state).unwrap();
        one_service.push(began.elapsed());
        // Two for its address, one for its cluster IP, one for the endpoint on this node; and for clients that keep their
        // endpoints one for its address, one for the timeout, and for each endpoint another.
        let kept = if affinity > 0 { 2 + endpoints as usize } else { 0 };
        assert_eq!(report.entries, 4 + endpoints as usize + kept, "more was written than one Service");

        let n = n * 7 % services;
        state.services.insert(service(n, endpoints + 1, affinity));
        let began = Instant::now();
        backend.apply(&state).unwrap();
        one_endpoint.push(began.elapsed());
    }

    // One Service whose 100 ports share a list of 1,000 source ranges.
    let mut guarded = (*service(services + changes, 0, 0).service).clone();
    guarded.load_balancer_ips = vec![IpAddr::V4(address(64, 0))];
    guarded.ports =
        (1..=100).map(|it| ServicePort::new(Protocol::Tcp, NonZeroU16::new(it).unwrap())).collect();
    guarded.source_ranges = (0..1_000).map(|n| IpNet::from(IpAddr::V4(address(80, 2 * n)))).collect();
    state.services.insert(ServiceState::new(guarded.clone(), []));
    let began = Instant::now();
    backend.apply(&state).unwrap();
    let source_ranges = began.elapsed();
    state.services.remove(&guarded.name);
    backend.apply(&state).unwrap();

    drop(backend);
    let began = Instant::now();
    let mut backend = start();
    let report = backend.apply(&state).unwrap();
    let restart = began.elapsed();
    assert_eq!(report.entries, 0, "a restart wrote what was right already");

    println!(
        "{{\"loadMs\":{:.3},\"oneServiceMs\":{:.3},\"oneEndpointMs\":{:.3},\"sourceRangesMs\":{:.3},\"restartMs\":{:.3}}}",
        millis(load),
        median(one_service),
        median(one_endpoint),
        millis(source_ranges),
        millis(restart)
    );
}
