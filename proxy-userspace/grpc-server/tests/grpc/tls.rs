//! Mutual TLS and authorization, with real certificates over real connections.

use std::{error::Error, fs, sync::Arc};

use grpc_server::{ClientStats, Clients, Listener, ServerTls};
use listeners::SocketAccess;
use model::{error_chain, state::NodeState};
use proxy_contract::{
    Target,
    client::Client,
    localnetv1::{NextFilter, NextItem, endpoints_client::EndpointsClient},
    localv1::op_item::Op,
    tls::ClientTls,
};
use publish::{NodeStates, Publisher, Subscription};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tonic::{
    Code, Status, Streaming,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::{
    common::{in_time, is_pending, serve, service, state, until},
    peer::NodePeer,
    pki::{Authority, Folder, Pair, Subject},
};

/// Every node, with the same state.
struct Every(Subscription);

impl NodeStates for Every {
    fn subscribe(&self, _: &str) -> Result<Subscription, publish::SubscribeError> {
        Ok(self.0.resubscribe())
    }
}

/// A brain that serves every node at a port, over TLS.
struct Brain {
    publisher: Publisher,
    files: Folder,
    target: Target,
    clients: Clients,
}

impl Brain {
    async fn new(allowed: &[&str]) -> (Authority, Self) {
        let ours = Authority::new("ours");
        let brain = Self::start(&ours.brain(), &ours.pem, allowed).await;
        (ours, brain)
    }

    async fn start(pair: &Pair, authorities: &str, allowed: &[&str]) -> Self {
        Self::start_at("localhost:0".parse().unwrap(), pair, authorities, allowed).await
    }

    async fn start_at(target: Target, pair: &Pair, authorities: &str, allowed: &[&str]) -> Self {
        let files = Folder::new(pair, authorities);
        let tls = ServerTls::new(files.files(), allowed.iter().map(|it| (*it).to_owned())).unwrap();
        let clients = Clients::default();
        let listener =
            Listener::bind_for(&target, Some(Arc::new(tls)), SocketAccess::default()).await.unwrap();
        let listener = listener.with_clients(clients.clone());
        let target = match listener.address() {
            Target::Tcp { port, .. } => Target::Tcp { host: "localhost".into(), port: *port },
            unix @ Target::Unix(_) => unix.clone(),
        };
        let publisher = Publisher::new("n1");
        publisher.publish(NodeState::default());
        serve(listener, Every(publisher.subscribe()));
        Self { publisher, files, target, clients }
    }

    fn address(&self) -> String {
        self.target.to_string().replace("tcp://", "")
    }

    async fn channel(&self, tls: ClientTlsConfig) -> Result<Channel, String> {
        let endpoint = Endpoint::from_shared(format!("https://{}", self.address())).unwrap();
        let endpoint = endpoint.tls_config(tls).unwrap();
        endpoint.connect().await.map_err(|it| error_chain(&it))
    }

    /// Requests the state of a node; returns the stream after its first item.
    async fn poll(&self, tls: ClientTlsConfig, node: &str) -> Result<Streaming<NextItem>, Rejection> {
        let channel = self.channel(tls).await.map_err(Rejection::Connection)?;
        let filter = NextFilter { node_name: node.into(), ..NextFilter::default() };
        in_time(async {
            let mut items = EndpointsClient::new(channel).next(filter).await?.into_inner();
            assert!(items.message().await?.unwrap().next.is_some());
            Ok(items)
        })
        .await
    }

    async fn ask(&self, tls: ClientTlsConfig, node: &str) -> Result<(), Rejection> {
        self.poll(tls, node).await.map(drop)
    }

    async fn ask_as(&self, authority: &Authority, pair: &Pair, node: &str) -> Result<(), Rejection> {
        self.ask(tls(authority, Some(pair)), node).await
    }

    /// A client of the library.
    fn client(&self, node: &str, tls: ClientTls) -> Client {
        Client::new(self.target.clone().into(), node).tls(tls)
    }
}

#[derive(Debug)]
enum Rejection {
    Connection(String),
    Request(Status),
}

impl From<Status> for Rejection {
    fn from(status: Status) -> Self {
        // With TLS 1.3 the client's handshake ends before the server has verified its certificate.
        match status.source() {
            Some(source) => Self::Connection(error_chain(source)),
            None => Self::Request(status),
        }
    }
}

fn tls(authority: &Authority, pair: Option<&Pair>) -> ClientTlsConfig {
    let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&authority.pem));
    pair.into_iter().fold(config, |config, it| config.identity(it.identity()))
}

#[track_caller]
fn denied(result: Result<(), Rejection>) -> String {
    match result {
        Err(Rejection::Request(status)) if status.code() == Code::PermissionDenied => {
            status.message().to_owned()
        }
        other => panic!("not denied: {other:?}"),
    }
}

#[track_caller]
fn rejected(result: Result<(), Rejection>, reason: &str) {
    match result {
        Err(Rejection::Connection(text)) if text.contains(reason) => {}
        other => panic!("expected {reason:?}: {other:?}"),
    }
}

#[tokio::test]
async fn a_client_without_a_valid_certificate_is_rejected() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("ours"));
    let brain = Brain::start(&ours.brain(), &ours.pem, &["anyone"]).await;
    let subject = Subject { common_name: "system:node:n1", ..Subject::default() };
    for (pair, reason) in [
        (None, "CertificateRequired"),
        (Some(theirs.sign(subject)), "fatal alert"),
        (Some(ours.sign(Subject { is_expired: true, ..subject })), "CertificateExpired"),
        (Some(ours.sign(Subject { is_for_servers: true, ..subject })), "fatal alert"),
    ] {
        rejected(brain.ask(tls(&ours, pair.as_ref()), "n1").await, reason);
    }
    brain.ask_as(&ours, &ours.sign(subject), "n1").await.unwrap();
}

#[tokio::test]
async fn a_client_rejects_a_brain_with_another_name_or_authority() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let node = ours.node("n1");
    let good = Brain::start(&ours.brain(), &ours.pem, &[]).await;
    rejected(good.ask(tls(&theirs, Some(&node)), "n1").await, "UnknownIssuer");
    let misnamed = ours.sign(Subject { dns: &["brain.test"], ..Subject::default() });
    let misnamed = Brain::start(&misnamed, &ours.pem, &[]).await;
    rejected(misnamed.ask(tls(&ours, Some(&node)), "n1").await, "not valid for name");
    let expired = ours.sign(Subject { dns: &["localhost"], is_expired: true, ..Subject::default() });
    let expired = Brain::start(&expired, &ours.pem, &[]).await;
    rejected(expired.ask(tls(&ours, Some(&node)), "n1").await, "expired");

    // The client library verifies the same, and can expect another name.
    let files = Folder::new(&node, &ours.pem);
    let follow = |tls| misnamed.client("n1", tls).watch();
    assert!(is_pending(500, follow(files.client()).next()).await);
    let renamed = files.client().server_name("brain.test").unwrap();
    in_time(follow(renamed).next()).await;
    assert!(files.client().server_name("no name").is_err());
}

#[tokio::test]
async fn a_certificate_permits_the_node_that_it_names() {
    let (ours, brain) = Brain::new(&["metrics.shop.svc"]).await;
    let by_name = Subject { common_name: "system:node:n1", ..Subject::default() };
    let by_dns = Subject { dns: &["n1", "n2.example.org"], ..Subject::default() };
    let by_id = Subject { uri: &["spiffe://cluster.local/node/n1"], ..Subject::default() };
    let by_uri = Subject { uri: &["system:node:n1"], ..Subject::default() };
    for subject in [by_name, by_dns, by_id, by_uri] {
        let pair = ours.sign(subject);
        brain.ask_as(&ours, &pair, "n1").await.unwrap();
        let message = denied(brain.ask_as(&ours, &pair, "n3").await);
        assert!(message.contains("no access to node \"n3\"") && message.contains("node \"n1\""), "{message}");
        // The brain's own node is no exception.
        assert!(denied(brain.ask_as(&ours, &pair, "").await).contains("the brain's own node"));
    }
    brain.ask_as(&ours, &ours.sign(by_dns), "n2.example.org").await.unwrap();

    // Names that only resemble node names.
    let no_node = [
        Subject { common_name: "n1", ..Subject::default() },
        Subject { common_name: "system:node:", ..Subject::default() },
        Subject { uri: &["spiffe://cluster.local/ns/x/sa/n1"], ..Subject::default() },
        Subject { uri: &["spiffe://cluster.local/node/n1/other"], ..Subject::default() },
        Subject { dns: &["*.example.org"], ..Subject::default() },
        Subject::default(),
    ];
    for subject in no_node {
        for node in ["n1", "n2.example.org", ""] {
            denied(brain.ask_as(&ours, &ours.sign(subject), node).await);
        }
    }
}

#[tokio::test]
async fn a_name_on_the_allow_list_permits_every_node() {
    let ours = Authority::new("ours");
    let allowed = ["chained-brain", "brain.other.svc", "spiffe://cluster.local/ns/x/sa/brain"];
    let brain = Brain::start(&ours.brain(), &ours.pem, &allowed).await;
    for subject in [
        Subject { common_name: allowed[0], ..Subject::default() },
        Subject { dns: &[allowed[1]], ..Subject::default() },
        Subject { uri: &[allowed[2]], ..Subject::default() },
    ] {
        for node in ["n1", "n7", ""] {
            brain.ask_as(&ours, &ours.sign(subject), node).await.unwrap();
        }
    }
    let other = ours.sign(Subject { common_name: "chained-brain-2", ..Subject::default() });
    denied(brain.ask_as(&ours, &other, "n1").await);
}

#[tokio::test]
async fn the_cluster_state_requires_a_name_on_the_allow_list() {
    let (ours, brain) = Brain::new(&["chained-brain"]).await;
    let cluster_state = async |pair: &Pair| {
        let files = Folder::new(pair, &ours.pem);
        let mut cluster = brain.client("n1", files.client()).cluster();
        in_time(cluster.next()).await
    };
    let Err(refused) = cluster_state(&ours.node("n1")).await else { panic!("not refused") };
    assert!(refused.to_string().contains("no access to the cluster state"), "{refused}");
    let chained = ours.sign(Subject { common_name: "chained-brain", ..Subject::default() });
    assert!(cluster_state(&chained).await.is_ok());
}

#[tokio::test]
async fn a_certificate_permits_explanations_for_the_node_that_it_names() {
    let (ours, brain) = Brain::new(&["metrics.shop.svc"]).await;
    let files = Folder::new(&ours.node("n1"), &ours.pem);
    let explain = async |node: &str| {
        let client = brain.client(node, files.client());
        in_time(client.explain(&["node".into()])).await
    };
    assert_eq!(explain("n1").await.unwrap().node_name, "n1");
    for node in ["n3", ""] {
        let refused = explain(node).await.unwrap_err().to_string();
        assert!(refused.contains("no access to "), "{refused}");
    }
}

#[tokio::test]
async fn every_request_of_a_stream_is_authorized() {
    let (ours, brain) = Brain::new(&[]).await;
    let channel = brain.channel(tls(&ours, Some(&ours.node("n1")))).await.unwrap();
    let mut peer = NodePeer::over(channel).await;
    peer.ask("n1").await;
    assert!(matches!(peer.item().await, Op::Reset(_)));
    assert!(peer.change_set().await.is_empty());
    peer.ask("n2").await;
    let refused = peer.fails().await;
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("no access to node \"n2\""), "{refused}");
}

#[tokio::test]
async fn health_and_reflection_require_only_a_valid_certificate() {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest,
    };
    let (ours, brain) = Brain::new(&[]).await;
    let nameless = ours.sign(Subject::default());
    let channel = brain.channel(tls(&ours, Some(&nameless))).await.unwrap();
    HealthClient::new(channel.clone()).check(HealthCheckRequest::default()).await.unwrap();
    let message_request = Some(MessageRequest::ListServices(String::new()));
    let request = tokio_stream::once(ServerReflectionRequest { message_request, ..Default::default() });
    let answers = ServerReflectionClient::new(channel).server_reflection_info(request).await;
    assert!(answers.unwrap().into_inner().message().await.unwrap().is_some());
}

#[tokio::test]
async fn a_brain_reloads_certificates_while_it_serves() {
    let ((old, brain), new) = (Brain::new(&[]).await, Authority::new("new"));
    let mine = Folder::new(&old.node("n1"), &old.pem);
    let mut watch = brain.client("n1", mine.client()).watch();
    in_time(watch.next()).await;

    // While the files do not match, the previous set stays in use.
    let of_new = tls(&new, Some(&new.node("n1")));
    let of_old = || tls(&old, Some(&old.node("n1")));
    let next = new.brain();
    fs::write(brain.files.files().key, &next.key).unwrap();
    brain.ask(of_old(), "n1").await.unwrap();
    rejected(brain.ask(of_new.clone(), "n1").await, "UnknownIssuer");

    // New connections use the new set; established ones stay.
    brain.files.write(&next, &new.pem);
    brain.ask(of_new, "n1").await.unwrap();
    rejected(brain.ask(of_old(), "n1").await, "UnknownIssuer");
    brain.publisher.publish(state([service("ns/a", &[("p", 1)])]));
    let state = in_time(watch.next()).await;
    assert!(state.services.contains_key("ns/a"));
}

#[tokio::test]
async fn a_client_uses_its_new_certificate_for_the_next_connection() {
    let ((old, brain), new) = (Brain::new(&[]).await, Authority::new("new"));
    let mine = Folder::new(&old.node("n1"), &old.pem);
    let client = brain.client("n1", mine.client());
    in_time(client.watch().next()).await;
    brain.files.write(&new.brain(), &new.pem);
    assert!(is_pending(300, client.watch().next()).await, "the old certificate is rejected");
    let mut waiting = client.watch();
    assert!(is_pending(300, waiting.next()).await);
    mine.write(&new.node("n1"), &new.pem);
    in_time(waiting.next()).await;
}

#[tokio::test]
async fn stalled_and_invalid_handshakes_end_without_affecting_others() {
    let (ours, brain) = Brain::new(&[]).await;
    let mut stalled = Vec::new();
    // Nothing; the beginning of a TLS record; text; HTTP/2 without TLS; arbitrary bytes.
    let garbage: [&[u8]; 5] = [
        b"",
        b"\x16\x03\x01\x02",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &[0xfe; 600],
    ];
    for round in 0..40 {
        let mut stream = TcpStream::connect(brain.address()).await.unwrap();
        // The brain may disconnect in the middle.
        let _ = stream.write_all(garbage[round % garbage.len()]).await;
        stalled.push(stream);
    }
    let pair = ours.node("n1");
    for _ in 0..5 {
        brain.ask_as(&ours, &pair, "n1").await.unwrap();
    }
    for stream in &mut stalled {
        // Some receive an alert; all connections end.
        in_time(async { while matches!(stream.read(&mut [0; 1024]).await, Ok(1..)) {} }).await;
    }
    brain.ask_as(&ours, &pair, "n1").await.unwrap();
}

#[tokio::test]
async fn pending_handshakes_of_any_number_keep_nobody_out() {
    let (ours, brain) = Brain::new(&[]).await;
    let pair = ours.node("n1");
    let mut pending = Vec::new();
    for _ in 0..3 {
        for _ in 0..200 {
            pending.push(TcpStream::connect(brain.address()).await.unwrap());
        }
        brain.ask_as(&ours, &pair, "n1").await.unwrap();
    }
    let ClientStats { handshakes, closed_handshakes, .. } = brain.clients.stats();
    // One of them may not have ended yet.
    assert!(handshakes <= 65 && closed_handshakes >= 500, "{handshakes} pending, {closed_handshakes} closed");
}

#[tokio::test]
async fn a_certificate_has_a_limited_number_of_connections() {
    let (ours, brain) = Brain::new(&["fleet"]).await;
    let (mine, other) = (ours.node("n1"), ours.node("n2"));
    let fleet = ours.sign(Subject { common_name: "fleet", ..Subject::default() });
    let hold = async |pair: &Pair, node: &str| brain.poll(tls(&ours, Some(pair)), node).await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(hold(&mine, "n1").await.unwrap());
    }
    assert!(hold(&mine, "n1").await.is_err(), "a ninth one");
    assert!(brain.clients.stats().refused_of_peer >= 1);
    held.push(hold(&other, "n2").await.unwrap());
    // Many agents may have one certificate, if it is on the allow-list.
    for node in 0..20 {
        held.push(hold(&fleet, &format!("n{node}")).await.unwrap());
    }
    assert_eq!(brain.clients.stats().open, 29);
    drop(held);
    until(|| brain.clients.stats().open == 0).await;
    hold(&mine, "n1").await.unwrap();
}

#[tokio::test]
async fn a_unix_socket_needs_no_certificate() {
    let (ours, folder) = (Authority::new("ours"), crate::common::Folder::new());
    let brain = Brain::start_at(Target::Unix(folder.socket()), &ours.brain(), &ours.pem, &[]).await;
    // A client does not use its certificate there.
    let mine = Folder::new(&ours.node("n1"), &ours.pem);
    let client = brain.client("n7", mine.client());
    in_time(client.watch().next()).await;
}

#[tokio::test]
async fn with_tls_every_address_is_allowed() {
    let ours = Authority::new("ours");
    Brain::start_at("0.0.0.0:0".parse().unwrap(), &ours.brain(), &ours.pem, &[]).await;
}
