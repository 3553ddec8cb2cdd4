//! What clients that never read cost a brain: the process of this test, which has no other test.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails; the numbers are of interest"
)]

use std::{
    fs,
    net::Ipv4Addr,
    num::NonZeroU16,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use grpc_server::{Clients, Listener, ServedData};
use hyper_util::rt::TokioIo;
use model::{
    Protocol, ServiceName,
    state::{Endpoint, EndpointKey, EndpointPort, NodeState, Scopes, Service, ServicePort, ServiceState},
};
use proxy_contract::{
    Target,
    localnetv1::{NextFilter, endpoints_client::EndpointsClient},
};
use publish::{Publisher, SingleNode, cluster::ClusterPublisher};
use tokio::{
    io::{AsyncRead, ReadBuf, join},
    net::{TcpStream, tcp::OwnedReadHalf},
    time::{sleep, timeout},
};
use tonic::{codegen::http::Uri, transport::Endpoint as TonicEndpoint};

const CONNECTIONS: usize = 20;
/// The server allows fewer at a time.
const STREAMS: usize = 40;
/// What a connection may cost, in bytes; the buffers of its streams, and what their frames add to them.
const MAX_COST: usize = 4 << 20;

/// A state of many MB on the wire.
fn large() -> NodeState {
    let port = NonZeroU16::new(8080).unwrap();
    let mut state = NodeState::default();
    for n in 0..2_000_u32 {
        let service = Service {
            cluster_ips: vec![Ipv4Addr::from_bits(0x0a60_0000 + n).into()],
            ports: vec![ServicePort::new(Protocol::Tcp, port)],
            ..Service::new(ServiceName::new("default", format!("service-{n}")))
        };
        let endpoints = (0..20).map(|it| Endpoint {
            v4: Some(Ipv4Addr::from_bits(0x0b00_0000 + n * 256 + it)),
            ports: [EndpointPort { index: 0, port, scopes: Scopes::default() }].into(),
            ..Endpoint::new(EndpointKey::Pod(
                format!("a-pod-with-a-name-as-long-as-names-are-{n}-{it:02}").into(),
            ))
        });
        state.services.insert(ServiceState::new(service, endpoints));
    }
    state
}

/// The reading half of a connection, which is not read any more once the flag is unset.
struct Unread {
    half: OwnedReadHalf,
    is_reading: Arc<AtomicBool>,
}

impl AsyncRead for Unread {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if !self.is_reading.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        Pin::new(&mut self.half).poll_read(cx, buf)
    }
}

/// Resident memory, in bytes.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|it| it.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

#[tokio::test]
async fn a_client_that_never_reads_costs_a_constant() {
    let publisher = Publisher::new("n1");
    publisher.publish(large());
    let cluster = ClusterPublisher::new(None);
    let served = ServedData::new(SingleNode::new("n1", publisher.subscribe()), &cluster);
    let clients = Clients::default();
    let listener =
        Listener::bind(&"127.0.0.1:0".parse().unwrap()).await.unwrap().with_clients(clients.clone());
    let Target::Tcp { port, .. } = *listener.address() else { panic!("it listens at a port") };
    tokio::spawn(grpc_server::serve(listener, served, async {}, std::future::pending()));

    let mut held = Vec::new();
    let mut start = 0;
    for n in 0..=CONNECTIONS {
        if n == 1 {
            // The first one has brought in what every connection needs.
            start = resident();
        }
        let is_reading = Arc::new(AtomicBool::new(true));
        let flag = Arc::clone(&is_reading);
        let connector = tower::service_fn(move |_: Uri| {
            let is_reading = Arc::clone(&flag);
            async move {
                let (half, writer) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?.into_split();
                Ok::<_, std::io::Error>(TokioIo::new(join(Unread { half, is_reading }, writer)))
            }
        });
        // It permits the server to send as much as it likes.
        let endpoint = TonicEndpoint::from_static("http://localhost")
            .initial_stream_window_size(1 << 30)
            .initial_connection_window_size(1 << 30);
        let channel = endpoint.connect_with_connector(connector).await.unwrap();
        let request = || NextFilter { node_name: "n1".into(), ..NextFilter::default() };
        let mut client = EndpointsClient::new(channel.clone());
        // The settings of both are known to both.
        drop(client.next(NextFilter { rev: u64::MAX, ..request() }).await.unwrap());
        is_reading.store(false, Ordering::Relaxed);
        for _ in 0..STREAMS {
            let mut client = client.clone();
            let request = request();
            held.push(tokio::spawn(async move { drop(client.next(request).await) }));
        }
        sleep(Duration::from_millis(100)).await;
    }
    let is_settled = async {
        let mut before = 0;
        while resident() > before + (64 << 10) {
            before = resident();
            sleep(Duration::from_secs(1)).await;
        }
    };
    timeout(Duration::from_secs(120), is_settled).await.unwrap();
    assert_eq!(clients.stats().open, CONNECTIONS + 1);
    let cost = resident().saturating_sub(start) / CONNECTIONS;
    println!("a connection of {STREAMS} requests whose responses are not read: {} kB", cost >> 10);
    assert!(cost < MAX_COST, "a connection costs {cost} bytes");
    held.iter().for_each(tokio::task::JoinHandle::abort);
}
