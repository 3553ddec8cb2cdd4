//! Clients and servers of Services on loopback addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::ErrorKind,
    net::SocketAddr,
    sync::Arc,
};

use proxy_contract::{
    client::ServiceEndpoints,
    localv1::{
        ClientIpAffinity, Endpoint, EndpointScopes, IpFilter, IpSet, PortMapping, PortName, Protocol,
        Service, ServiceIPs, service::SessionAffinity,
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

async fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port()
}

fn service(name: &str, ip: &str, protocol: Protocol, port: u16) -> (String, ServiceEndpoints) {
    let ips = ServiceIPs { cluster_ips: set(ip), ..ServiceIPs::default() };
    let port = PortMapping { protocol: protocol.into(), port: port.into(), ..PortMapping::default() };
    let service = Service { ips: Some(ips), ports: vec![port], ..Service::default() };
    (format!("default/{name}"), ServiceEndpoints { service, endpoints: BTreeMap::new() })
}

fn set(ip: &str) -> Option<IpSet> {
    Some(IpSet { v4: vec![ip.to_owned()], v6: Vec::new() })
}

/// The datapath with all that was applied, at the addresses of the Services, which are loopback addresses here.
struct Proxy {
    datapath: Datapath,
    services: BTreeMap<Arc<str>, Arc<ServiceEndpoints>>,
}

impl Proxy {
    fn new(listen_at: ListenAt) -> Self {
        Self { datapath: Datapath::new(listen_at, Vec::new()), services: BTreeMap::new() }
    }

    fn set(&mut self, (name, service): &(String, ServiceEndpoints), servers: &[&Server]) {
        let scopes = EndpointScopes { internal: true, external: true, cluster: None };
        let endpoints = servers.iter().enumerate().map(|(key, it)| {
            let port = PortName { port: it.address.port().into(), index: Some(0), ..PortName::default() };
            let endpoint = Endpoint {
                ips: set("127.0.0.1"),
                port_overrides: vec![port],
                scopes: Some(scopes),
                ..Endpoint::default()
            };
            (format!("p{key}").into(), Arc::new(endpoint))
        });
        let service = ServiceEndpoints { service: service.service.clone(), endpoints: endpoints.collect() };
        self.services.insert(name.as_str().into(), Arc::new(service));
        self.apply(name);
    }

    fn delete(&mut self, (name, _): &(String, ServiceEndpoints)) {
        self.services.remove(name.as_str());
        self.apply(name);
    }

    fn apply(&mut self, name: &str) {
        self.datapath.apply_some(&self.services, &BTreeSet::from([name.into()]));
    }
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
    let at = SocketAddr::from(([127, 77, 0, 1], free_port().await));
    let web = service("web", "127.77.0.1", Protocol::Tcp, at.port());
    let mut proxy = Proxy::new(ListenAt::Services);
    proxy.set(&web, &[&one]);
    let mut established = TcpStream::connect(at).await.unwrap();
    assert_eq!(ask(&mut established).await, one.address.port());
    proxy.set(&web, &[&two]);
    for _ in 0..20 {
        assert_eq!(ask_at(at).await, two.address.port());
    }
    assert_eq!(ask(&mut established).await, one.address.port());
    proxy.set(&web, &[]);
    tokio::task::yield_now().await;
    assert_eq!(TcpStream::connect(at).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(ask(&mut established).await, one.address.port());
}

#[tokio::test]
async fn connections_are_spread_and_go_on_to_an_endpoint_that_answers() {
    let [one, two, gone] = [Server::tcp().await, Server::tcp().await, Server::tcp().await];
    let at = SocketAddr::from(([127, 77, 0, 2], free_port().await));
    let mut proxy = Proxy::new(ListenAt::Services);
    proxy.set(&service("web", "127.77.0.2", Protocol::Tcp, at.port()), &[&one, &two, &gone]);
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
    let at = SocketAddr::from(([127, 77, 0, 3], free_port().await));
    let mut web = service("web", "127.77.0.3", Protocol::Tcp, at.port());
    web.1.service.session_affinity =
        Some(SessionAffinity::ClientIp(ClientIpAffinity { timeout_seconds: 60 }));
    let mut proxy = Proxy::new(ListenAt::Services);
    proxy.set(&web, &servers.iter().collect::<Vec<_>>());
    let first = ask_at(at).await;
    for _ in 0..20 {
        assert_eq!(ask_at(at).await, first);
    }
    // A change of the Service is no reason to move.
    let mut remaining: Vec<_> = servers.iter().filter(|it| it.address.port() != first).collect();
    let gone = remaining.pop().unwrap();
    let kept = servers.iter().find(|it| it.address.port() == first).unwrap();
    proxy.set(&web, &[remaining[0], kept]);
    assert_eq!(ask_at(at).await, first);
    proxy.set(&web, &[gone, remaining[0]]);
    let second = ask_at(at).await;
    assert_ne!(second, first);
    assert_eq!(ask_at(at).await, second);
}

#[tokio::test]
async fn datagrams_of_a_flow_go_to_one_endpoint_while_it_serves() {
    let [one, two] = [Server::udp().await, Server::udp().await];
    let at = SocketAddr::from(([127, 77, 0, 4], free_port().await));
    let dns = service("dns", "127.77.0.4", Protocol::Udp, at.port());
    let mut proxy = Proxy::new(ListenAt::Services);
    proxy.set(&dns, &[&one]);
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.connect(at).await.unwrap();
    let ask = async || {
        client.send(b"?").await.unwrap();
        let mut answer = [0; 2];
        client.recv(&mut answer).await.unwrap();
        u16::from_be_bytes(answer)
    };
    assert_eq!(ask().await, one.address.port());
    proxy.set(&dns, &[&one, &two]);
    for _ in 0..20 {
        assert_eq!(ask().await, one.address.port());
    }
    proxy.set(&dns, &[&two]);
    assert_eq!(ask().await, two.address.port());
    assert_eq!(proxy.datapath.table.udp_flows.available_permits(), 4096 - 1, "the former flow has ended");
}

#[tokio::test]
async fn sources_outside_the_ranges_are_not_served() {
    let server = Server::tcp().await;
    let port = free_port().await;
    let with = |range: &str| {
        let mut web = service("web", "127.77.0.5", Protocol::Tcp, port);
        let filter = IpFilter { target_ips: set("127.77.1.5"), source_ranges: vec![range.to_owned()] };
        web.1.service.ips.as_mut().unwrap().load_balancer_ips = set("127.77.1.5");
        web.1.service.ip_filters = vec![filter];
        web
    };
    let (cluster_ip, load_balancer) = (([127, 77, 0, 5], port).into(), ([127, 77, 1, 5], port).into());
    let mut proxy = Proxy::new(ListenAt::Services);
    proxy.set(&with("203.0.113.0/24"), &[&server]);
    assert_eq!(ask_at(cluster_ip).await, server.address.port());
    let mut refused = TcpStream::connect::<SocketAddr>(load_balancer).await.unwrap();
    assert_eq!(refused.read_u16().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    proxy.set(&with("127.0.0.0/8"), &[&server]);
    assert_eq!(ask_at(load_balancer).await, server.address.port());
}

#[tokio::test]
async fn each_service_has_a_loopback_address_and_contested_ones_are_reported() {
    let [one, two] = [Server::tcp().await, Server::tcp().await];
    let (port, node_port) = (free_port().await, free_port().await);
    let mut first = service("a", "10.77.0.6", Protocol::Tcp, port);
    first.1.service.ports[0].node_port = node_port.into();
    let second = service("b", "172.77.0.6", Protocol::Tcp, port);
    let at = SocketAddr::from(([127, 77, 0, 6], port));
    let mut proxy = Proxy::new(ListenAt::Loopback);
    proxy.set(&second, &[&two]);
    assert_eq!(ask_at(at).await, two.address.port());
    proxy.set(&first, &[&one]);
    assert_eq!(ask_at(at).await, one.address.port());
    assert_eq!(ask_at(([127, 0, 0, 1], node_port).into()).await, one.address.port());
    let [not_served] = &proxy.datapath.not_served()[..] else { panic!() };
    assert_eq!(&*not_served.service, "default/b");
    assert!(not_served.reason.contains("default/a has 127.77.0.6"), "{not_served:?}");
    proxy.delete(&first);
    assert_eq!((ask_at(at).await, proxy.datapath.not_served()), (two.address.port(), Vec::new()));
}

#[tokio::test]
async fn an_address_in_use_is_reported_served_once_it_is_free_and_closed_by_a_state_without_it() {
    let server = Server::tcp().await;
    let other = TcpListener::bind("127.77.0.7:0").await.unwrap();
    let at = other.local_addr().unwrap();
    let mut proxy = Proxy::new(ListenAt::Services);
    proxy.set(&service("web", "127.77.0.7", Protocol::Tcp, at.port()), &[&server]);
    let [not_served] = &proxy.datapath.not_served()[..] else { panic!() };
    assert_eq!(&*not_served.service, "default/web");
    assert!(not_served.reason.contains("end the program that listens there"), "{not_served:?}");
    proxy.apply("default/other");
    assert_eq!(proxy.datapath.not_served().len(), 1);
    drop(other);
    proxy.apply("default/other");
    assert!(proxy.datapath.not_served().is_empty());
    assert_eq!(ask_at(at).await, server.address.port());
    proxy.datapath.apply_all(&BTreeMap::new());
    tokio::task::yield_now().await;
    assert_eq!(TcpStream::connect(at).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

#[test]
#[cfg(unix)]
fn the_remedy_of_too_many_open_files_is_their_limit() {
    let error = std::io::Error::from_raw_os_error(24);
    assert_eq!(error.to_string(), "Too many open files (os error 24)");
    let remedy = listener::remedy(&error, ListenAt::Services);
    assert!(remedy.starts_with("raise the limit of open files"), "{remedy}");
}
