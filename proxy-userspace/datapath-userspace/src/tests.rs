//! Clients and servers of Services on loopback addresses.

use std::{
    collections::BTreeSet,
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddr},
    num::{NonZeroU16, NonZeroU32},
};

use model::{
    Protocol, ServiceName,
    state::{
        ClientIpAffinity, Endpoint, EndpointKey, EndpointPort, NodeState, Scopes, Service, ServicePort,
        ServiceState,
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    task::AbortHandle,
};

use super::*;

/// A server that answers everything by its own address.
struct Server {
    address: SocketAddr,
    task: AbortHandle,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    async fn tcp() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).await.is_ok() {
                        stream.write_u16(address.port()).await.unwrap();
                    }
                });
            }
        });
        Self { address, task: task.abort_handle() }
    }

    async fn udp() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let task = tokio::spawn(async move {
            while let Ok((_, client)) = socket.recv_from(&mut [0; 8]).await {
                socket.send_to(&address.port().to_be_bytes(), client).await.unwrap();
            }
        });
        Self { address, task: task.abort_handle() }
    }
}

/// A port that nothing listens at.
async fn free_port() -> NonZeroU16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    NonZeroU16::new(listener.local_addr().unwrap().port()).unwrap()
}

fn service(name: &str, ip: [u8; 4], protocol: Protocol, port: NonZeroU16) -> Service {
    Service {
        cluster_ips: vec![Ipv4Addr::from(ip).into()],
        ports: vec![ServicePort::new(protocol, port)],
        ..Service::new(ServiceName::new("default", name))
    }
}

fn endpoints(service: Service, servers: &[&Server]) -> ServiceState {
    let scopes = Scopes { internal: true, external: true, cluster: true };
    let endpoints = servers.iter().enumerate().map(|(key, it)| Endpoint {
        v4: Some(Ipv4Addr::LOCALHOST),
        ports: [EndpointPort { index: 0, port: NonZeroU16::new(it.address.port()).unwrap(), scopes }].into(),
        ..Endpoint::new(EndpointKey::Pod(format!("p{key}").into()))
    });
    ServiceState::new(service, endpoints)
}

fn state(services: impl IntoIterator<Item = ServiceState>) -> NodeState {
    NodeState { services: services.into_iter().map(Arc::new).collect(), ..NodeState::default() }
}

/// Listens at the addresses of the Services themselves, which are loopback addresses here.
fn datapath() -> Datapath {
    Datapath::new(Options { listen_at: ListenAt::Services, ..Options::default() })
}

async fn ask(stream: &mut TcpStream) -> u16 {
    stream.write_all(b"?").await.unwrap();
    stream.read_u16().await.unwrap()
}

async fn ask_at(address: SocketAddr) -> u16 {
    ask(&mut TcpStream::connect(address).await.unwrap()).await
}

#[tokio::test]
async fn new_connections_follow_the_state_and_established_ones_are_kept() {
    let [one, two] = [Server::tcp().await, Server::tcp().await];
    let at = SocketAddr::from(([127, 77, 0, 1], free_port().await.get()));
    let web = |servers: &[&Server]| {
        let port = NonZeroU16::new(at.port()).unwrap();
        state([endpoints(service("web", [127, 77, 0, 1], Protocol::Tcp, port), servers)])
    };
    let mut datapath = datapath();
    let report = datapath.apply(&web(&[&one]));
    assert_eq!((report.changed_services, report.services, report.flipped), (1, 1, true));
    let mut established = TcpStream::connect(at).await.unwrap();
    assert_eq!(ask(&mut established).await, one.address.port());
    datapath.apply(&web(&[&two]));
    for _ in 0..20 {
        assert_eq!(ask_at(at).await, two.address.port());
    }
    assert_eq!(ask(&mut established).await, one.address.port());
    assert!(!datapath.apply(&web(&[&two])).flipped, "an equal state changes nothing");
    datapath.apply(&web(&[]));
    tokio::task::yield_now().await;
    assert_eq!(TcpStream::connect(at).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(ask(&mut established).await, one.address.port());
}

#[tokio::test]
async fn connections_are_spread_and_go_on_to_an_endpoint_that_answers() {
    let [one, two, gone] = [Server::tcp().await, Server::tcp().await, Server::tcp().await];
    let at = SocketAddr::from(([127, 77, 0, 2], free_port().await.get()));
    let service = service("web", [127, 77, 0, 2], Protocol::Tcp, NonZeroU16::new(at.port()).unwrap());
    let mut datapath = datapath();
    datapath.apply(&state([endpoints(service, &[&one, &two, &gone])]));
    gone.task.abort();
    tokio::task::yield_now().await;
    let mut found = BTreeSet::new();
    for _ in 0..60 {
        found.insert(ask_at(at).await);
    }
    assert_eq!(found, BTreeSet::from([one.address.port(), two.address.port()]));
}

#[tokio::test]
async fn a_client_with_affinity_keeps_its_endpoint_while_that_serves() {
    let servers = [Server::tcp().await, Server::tcp().await, Server::tcp().await];
    let at = SocketAddr::from(([127, 77, 0, 3], free_port().await.get()));
    let service = Service {
        affinity: Some(ClientIpAffinity { timeout_seconds: NonZeroU32::new(60).unwrap() }),
        ..service("web", [127, 77, 0, 3], Protocol::Tcp, NonZeroU16::new(at.port()).unwrap())
    };
    let with = |servers: &[&Server]| state([endpoints(service.clone(), servers)]);
    let mut datapath = datapath();
    datapath.apply(&with(&servers.iter().collect::<Vec<_>>()));
    let first = ask_at(at).await;
    for _ in 0..20 {
        assert_eq!(ask_at(at).await, first);
    }
    // A change of the Service is no reason to move.
    let mut remaining: Vec<_> = servers.iter().filter(|it| it.address.port() != first).collect();
    let gone = remaining.pop().unwrap();
    let kept = servers.iter().find(|it| it.address.port() == first).unwrap();
    datapath.apply(&with(&[remaining[0], kept]));
    assert_eq!(ask_at(at).await, first);
    datapath.apply(&with(&[gone, remaining[0]]));
    let second = ask_at(at).await;
    assert_ne!(second, first);
    assert_eq!(ask_at(at).await, second);
}

#[tokio::test]
async fn datagrams_of_a_flow_go_to_one_endpoint_while_it_serves() {
    let [one, two] = [Server::udp().await, Server::udp().await];
    let port = free_port().await;
    let at = SocketAddr::from(([127, 77, 0, 4], port.get()));
    let dns = |servers: &[&Server]| {
        state([endpoints(service("dns", [127, 77, 0, 4], Protocol::Udp, port), servers)])
    };
    let mut datapath = datapath();
    datapath.apply(&dns(&[&one]));
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.connect(at).await.unwrap();
    let ask = async || {
        client.send(b"?").await.unwrap();
        let mut answer = [0; 2];
        client.recv(&mut answer).await.unwrap();
        u16::from_be_bytes(answer)
    };
    assert_eq!(ask().await, one.address.port());
    datapath.apply(&dns(&[&one, &two]));
    for _ in 0..20 {
        assert_eq!(ask().await, one.address.port());
    }
    datapath.apply(&dns(&[&two]));
    assert_eq!(ask().await, two.address.port());
    assert_eq!(datapath.table.udp_flows.available_permits(), 4096 - 1, "the former flow has ended");
}

#[tokio::test]
async fn sources_outside_the_ranges_are_not_served() {
    let server = Server::tcp().await;
    let port = free_port().await;
    let service = |range: &str| Service {
        load_balancer_ips: vec![Ipv4Addr::new(127, 77, 1, 5).into()],
        source_ranges: vec![range.parse().unwrap()],
        ..service("web", [127, 77, 0, 5], Protocol::Tcp, port)
    };
    let (cluster_ip, load_balancer) =
        (([127, 77, 0, 5], port.get()).into(), ([127, 77, 1, 5], port.get()).into());
    let mut datapath = datapath();
    datapath.apply(&state([endpoints(service("203.0.113.0/24"), &[&server])]));
    assert_eq!(ask_at(cluster_ip).await, server.address.port());
    let mut refused = TcpStream::connect::<SocketAddr>(load_balancer).await.unwrap();
    assert_eq!(refused.read_u16().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    datapath.apply(&state([endpoints(service("127.0.0.0/8"), &[&server])]));
    assert_eq!(ask_at(load_balancer).await, server.address.port());
}

#[tokio::test]
async fn each_service_has_a_loopback_address_and_contested_ones_are_reported() {
    let [one, two] = [Server::tcp().await, Server::tcp().await];
    let (port, node_port) = (free_port().await, free_port().await);
    let mut first = service("a", [10, 77, 0, 6], Protocol::Tcp, port);
    first.ports[0].node_port = Some(node_port);
    let second = service("b", [172, 77, 0, 6], Protocol::Tcp, port);
    let at = SocketAddr::from(([127, 77, 0, 6], port.get()));
    let mut datapath = Datapath::new(Options::default());
    let report = datapath.apply(&state([endpoints(first, &[&one]), endpoints(second.clone(), &[&two])]));
    assert_eq!(ask_at(at).await, one.address.port());
    assert_eq!(ask_at(([127, 0, 0, 1], node_port.get()).into()).await, one.address.port());
    let [rejected] = &report.rejected[..] else { panic!("{:?}", report.rejected) };
    assert_eq!(rejected.item, "Service default/b");
    assert!(rejected.reason.contains("default/a has 127.77.0.6"), "{rejected}");
    let report = datapath.apply(&state([endpoints(second, &[&two])]));
    assert_eq!((ask_at(at).await, report.rejected), (two.address.port(), Vec::new()));
}

#[tokio::test]
async fn an_address_in_use_is_reported_and_served_once_it_is_free() {
    let server = Server::tcp().await;
    let other = TcpListener::bind("127.77.0.7:0").await.unwrap();
    let at = other.local_addr().unwrap();
    let port = NonZeroU16::new(at.port()).unwrap();
    let mut datapath = datapath();
    let report =
        datapath.apply(&state([endpoints(service("web", [127, 77, 0, 7], Protocol::Tcp, port), &[&server])]));
    let [rejected] = &report.rejected[..] else { panic!("{:?}", report.rejected) };
    assert!(rejected.item.starts_with("Service default/web: 127.77.0.7:"), "{rejected}");
    assert!(rejected.reason.contains("end the program that listens there"), "{rejected}");
    datapath.retry();
    assert!(datapath.has_failed());
    drop(other);
    datapath.retry();
    assert!(!datapath.has_failed() && datapath.rejected().is_empty());
    assert_eq!(ask_at(at).await, server.address.port());
}

#[test]
fn the_remedy_of_too_many_open_files_is_their_limit() {
    let error = std::io::Error::from_raw_os_error(24);
    assert_eq!(error.to_string(), "Too many open files (os error 24)");
    let remedy = listener::remedy(&error, ListenAt::Services);
    assert!(remedy.starts_with("raise the limit of open files"), "{remedy}");
}
