//! Who gets in by a port, and what he may ask for: real certificates over real connections.

use std::{error::Error, fs, future::Future, sync::Arc, time::Duration};

use model::state::NodeState;
use proxy_contract::{
    Target,
    client::Client,
    localnetv1::{NextFilter, endpoints_client::EndpointsClient},
    localv1::{WatchReq, op_item::Op, sets_client::SetsClient},
};
use publish::{
    Publisher, Subscription,
    cluster::{ClusterPublisher, ClusterSnapshot},
    grpc::{self, Listener, NodeStates, ServedData, ServerTls},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Status,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::{
    common::{LIMIT, service, state},
    pki::{Authority, Folder, Pair, Says},
};

/// Every node, with the same state.
struct Every(Subscription);

impl NodeStates for Every {
    fn subscribe(&self, _: &str, seen: (u64, u64)) -> Result<Subscription, publish::SubscribeError> {
        Ok(self.0.resume(seen.0, seen.1))
    }
}

/// Every node, and the facts of an empty cluster.
fn served(publisher: &Publisher) -> ServedData {
    let cluster = ClusterPublisher::new(None);
    let followed = cluster.subscribe();
    cluster.publish(ClusterSnapshot::State(Arc::default()));
    ServedData { nodes: Arc::new(Every(publisher.subscribe())), cluster: followed }
}

/// A brain that serves every node at a port, over TLS.
struct Brain {
    publisher: Publisher,
    files: Folder,
    target: Target,
    serving: JoinHandle<Result<(), grpc::ServeError>>,
}

impl Brain {
    async fn start(pair: &Pair, authorities: &str, allowed: &[&str]) -> Self {
        let files = Folder::new(pair, authorities);
        let tls = ServerTls::new(files.files(), allowed.iter().map(|it| (*it).to_owned())).unwrap();
        let listener =
            Listener::bind_tls(&"localhost:0".parse().unwrap(), Some(Arc::new(tls))).await.unwrap();
        let Target::Tcp { port, .. } = *listener.address() else { panic!("a port was asked for") };
        let target = Target::Tcp { host: "localhost".into(), port };
        let publisher = Publisher::new("n1");
        publisher.publish(NodeState::default());
        let served = served(&publisher);
        let serving = tokio::spawn(grpc::serve(listener, served, async {}, std::future::pending()));
        Self { publisher, files, target, serving }
    }

    fn address(&self) -> String {
        self.target.to_string().replace("tcp://", "")
    }

    async fn channel(&self, tls: ClientTlsConfig) -> Result<Channel, String> {
        let endpoint = Endpoint::from_shared(format!("https://{}", self.address())).unwrap();
        endpoint.tls_config(tls).map_err(|it| chain(&it))?.connect().await.map_err(|it| chain(&it))
    }

    /// Asks for a node's state, and gets it, or learns why not.
    async fn ask(&self, tls: ClientTlsConfig, node: &str) -> Result<(), Refusal> {
        let channel = self.channel(tls).await.map_err(Refusal::Connection)?;
        let filter = NextFilter { node_name: node.into(), ..NextFilter::default() };
        let asked = async { EndpointsClient::new(channel).next(filter).await?.into_inner().message().await };
        let item = timeout(LIMIT, asked).await.unwrap()?;
        assert!(item.unwrap().next.is_some());
        Ok(())
    }
}

impl Drop for Brain {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

#[derive(Debug)]
enum Refusal {
    Connection(String),
    Request(Status),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        // The handshake is over for the client before the brain has looked at its certificate.
        match status.source() {
            Some(source) => Self::Connection(chain(source)),
            None => Self::Request(status),
        }
    }
}

fn chain(error: &dyn Error) -> String {
    let cause = error.source().map(chain);
    cause.into_iter().fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn tls(authority: &Authority, pair: Option<&Pair>) -> ClientTlsConfig {
    let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&authority.pem));
    pair.into_iter().fold(config, |config, it| config.identity(it.identity()))
}

/// The message of a request that was refused.
#[track_caller]
fn denied(result: Result<(), Refusal>) -> String {
    match result {
        Err(Refusal::Request(status)) if status.code() == Code::PermissionDenied => {
            status.message().to_owned()
        }
        other => panic!("it was not denied: {other:?}"),
    }
}

#[track_caller]
fn shut_out(result: Result<(), Refusal>, reason: &str) {
    match result {
        Err(Refusal::Connection(text)) if text.contains(reason) => {}
        other => panic!("{reason:?} was expected: {other:?}"),
    }
}

#[tokio::test]
async fn nobody_gets_in_without_a_good_certificate() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("ours"));
    let brain = Brain::start(&ours.brain(), &ours.pem, &["everybody"]).await;
    shut_out(brain.ask(tls(&ours, None), "n1").await, "CertificateRequired");
    let says = Says { common_name: "system:node:n1", ..Says::default() };
    shut_out(brain.ask(tls(&ours, Some(&theirs.sign(says))), "n1").await, "fatal alert");
    let expired = ours.sign(Says { is_expired: true, ..says });
    shut_out(brain.ask(tls(&ours, Some(&expired)), "n1").await, "CertificateExpired");
    let other = ours.sign(Says { is_for_servers: true, ..says });
    shut_out(brain.ask(tls(&ours, Some(&other)), "n1").await, "fatal alert");
    brain.ask(tls(&ours, Some(&ours.sign(says))), "n1").await.unwrap();
}

#[tokio::test]
async fn a_brain_with_another_name_or_authority_is_not_believed() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let node = ours.node("n1");
    let good = Brain::start(&ours.brain(), &ours.pem, &[]).await;
    shut_out(good.ask(tls(&theirs, Some(&node)), "n1").await, "UnknownIssuer");
    let misnamed =
        Brain::start(&ours.sign(Says { dns: &["brain.test"], ..Says::default() }), &ours.pem, &[]).await;
    shut_out(misnamed.ask(tls(&ours, Some(&node)), "n1").await, "not valid for name");
    let expired = ours.sign(Says { dns: &["localhost"], is_expired: true, ..Says::default() });
    let expired = Brain::start(&expired, &ours.pem, &[]).await;
    shut_out(expired.ask(tls(&ours, Some(&node)), "n1").await, "expired");

    // The client library keeps to the same, and can be told another name.
    let files = Folder::new(&node, &ours.pem);
    let follow = |tls| Client::new(misnamed.target.clone(), "n1").tls(tls).watch();
    assert!(timeout(Duration::from_millis(500), follow(files.client()).next()).await.is_err());
    let told = files.client().server_name("brain.test").unwrap();
    assert!(timeout(LIMIT, follow(told).next()).await.unwrap().is_some());
    assert!(files.client().server_name("no name").is_err());
}

#[tokio::test]
async fn a_client_may_ask_for_the_node_that_its_certificate_names() {
    let ours = Authority::new("ours");
    let brain = Brain::start(&ours.brain(), &ours.pem, &["metrics.shop.svc"]).await;
    let by_name = Says { common_name: "system:node:n1", ..Says::default() };
    let by_dns = Says { dns: &["n1", "n2.example.org"], ..Says::default() };
    let by_id = Says { uri: &["spiffe://cluster.local/node/n1"], ..Says::default() };
    let by_uri = Says { uri: &["system:node:n1"], ..Says::default() };
    for says in [by_name, by_dns, by_id, by_uri] {
        let pair = ours.sign(says);
        brain.ask(tls(&ours, Some(&pair)), "n1").await.unwrap();
        let message = denied(brain.ask(tls(&ours, Some(&pair)), "n3").await);
        assert!(
            message.contains("node \"n3\" was asked for") && message.contains("node \"n1\""),
            "{message}"
        );
        // The brain's own node is one like any other.
        assert!(denied(brain.ask(tls(&ours, Some(&pair)), "").await).contains("the brain's own node"));
    }
    brain.ask(tls(&ours, Some(&ours.sign(by_dns))), "n2.example.org").await.unwrap();

    // What looks like it, and is not.
    let no_node = [
        Says { common_name: "n1", ..Says::default() },
        Says { common_name: "system:node:", ..Says::default() },
        Says { uri: &["spiffe://cluster.local/ns/x/sa/n1"], ..Says::default() },
        Says { uri: &["spiffe://cluster.local/node/n1/other"], ..Says::default() },
        Says { dns: &["*.example.org"], ..Says::default() },
        Says::default(),
    ];
    for says in no_node {
        for node in ["n1", "n2.example.org", ""] {
            denied(brain.ask(tls(&ours, Some(&ours.sign(says))), node).await);
        }
    }
}

#[tokio::test]
async fn whom_the_allow_list_names_may_ask_for_every_node() {
    let ours = Authority::new("ours");
    let allowed = ["chained-brain", "brain.other.svc", "spiffe://cluster.local/ns/x/sa/brain"];
    let brain = Brain::start(&ours.brain(), &ours.pem, &allowed).await;
    for says in [
        Says { common_name: allowed[0], ..Says::default() },
        Says { dns: &[allowed[1]], ..Says::default() },
        Says { uri: &[allowed[2]], ..Says::default() },
    ] {
        for node in ["n1", "n7", ""] {
            brain.ask(tls(&ours, Some(&ours.sign(says))), node).await.unwrap();
        }
    }
    let other = ours.sign(Says { common_name: "chained-brain-2", ..Says::default() });
    denied(brain.ask(tls(&ours, Some(&other)), "n1").await);
}

#[tokio::test]
async fn the_whole_cluster_is_for_those_whom_the_allow_list_names() {
    let ours = Authority::new("ours");
    let brain = Brain::start(&ours.brain(), &ours.pem, &["chained-brain"]).await;
    let facts = async |pair: &Pair| {
        let files = Folder::new(pair, &ours.pem);
        let mut cluster = Client::new(brain.target.clone(), "n1").tls(files.client()).cluster();
        timeout(LIMIT, cluster.next()).await.unwrap()
    };
    let Err(refused) = facts(&ours.node("n1")).await else { panic!("it got the facts") };
    assert!(refused.to_string().contains("the whole cluster was asked for"), "{refused}");
    let chained = ours.sign(Says { common_name: "chained-brain", ..Says::default() });
    assert!(facts(&chained).await.is_ok());
}

#[tokio::test]
async fn every_request_of_a_stream_is_looked_at() {
    let ours = Authority::new("ours");
    let brain = Brain::start(&ours.brain(), &ours.pem, &[]).await;
    let channel = brain.channel(tls(&ours, Some(&ours.node("n1")))).await.unwrap();
    let (requests, outgoing) = tokio::sync::mpsc::channel(1);
    let ask = async |node: &str| {
        requests.send(WatchReq { node_name: node.into(), ..WatchReq::default() }).await.unwrap();
    };
    ask("n1").await;
    let items = SetsClient::new(channel).watch(ReceiverStream::new(outgoing)).await;
    let mut items = items.unwrap().into_inner();
    let mut item = async || timeout(LIMIT, items.message()).await.unwrap();
    assert!(matches!(item().await.unwrap().unwrap().op, Some(Op::Reset(_))));
    assert!(matches!(item().await.unwrap().unwrap().op, Some(Op::Sync(_))));
    ask("n2").await;
    let refused = item().await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("node \"n2\" was asked for"), "{refused}");
}

#[tokio::test]
async fn health_and_reflection_are_for_everybody_with_a_certificate() {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest,
    };
    let ours = Authority::new("ours");
    let brain = Brain::start(&ours.brain(), &ours.pem, &[]).await;
    let nobody = ours.sign(Says::default());
    let channel = brain.channel(tls(&ours, Some(&nobody))).await.unwrap();
    HealthClient::new(channel.clone()).check(HealthCheckRequest::default()).await.unwrap();
    let message_request = Some(MessageRequest::ListServices(String::new()));
    let request = tokio_stream::once(ServerReflectionRequest { message_request, ..Default::default() });
    let answers = ServerReflectionClient::new(channel).server_reflection_info(request).await;
    assert!(answers.unwrap().into_inner().message().await.unwrap().is_some());
}

#[tokio::test]
async fn a_brain_takes_new_certificates_while_it_serves() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let brain = Brain::start(&old.brain(), &old.pem, &[]).await;
    let mine = Folder::new(&old.node("n1"), &old.pem);
    let mut watch = Client::new(brain.target.clone(), "n1").tls(mine.client()).watch();
    assert!(timeout(LIMIT, watch.next()).await.unwrap().is_some());

    // A key of another certificate, half a file, no file: what was there stays.
    let of_new = tls(&new, Some(&new.node("n1")));
    let of_old = || tls(&old, Some(&old.node("n1")));
    let files = brain.files.files();
    fs::write(&files.key, new.brain().key).unwrap();
    brain.ask(of_old(), "n1").await.unwrap();
    let next = new.brain();
    fs::write(&files.certificate, &next.certificate[..200]).unwrap();
    brain.ask(of_old(), "n1").await.unwrap();
    fs::remove_file(&files.authorities).unwrap();
    brain.ask(of_old(), "n1").await.unwrap();
    shut_out(brain.ask(of_new.clone(), "n1").await, "UnknownIssuer");

    // Whoever comes now meets the new ones; who is there stays.
    brain.files.write(&next, &new.pem);
    brain.ask(of_new, "n1").await.unwrap();
    shut_out(brain.ask(of_old(), "n1").await, "UnknownIssuer");
    brain.publisher.publish(state([service("ns/a", &[("p", 1)])]));
    let state = timeout(LIMIT, watch.next()).await.unwrap().unwrap();
    assert!(state.services.contains_key("ns/a"));
}

#[tokio::test]
async fn a_client_shows_its_new_certificate_at_the_next_connect() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let brain = Brain::start(&old.brain(), &old.pem, &[]).await;
    let mine = Folder::new(&old.node("n1"), &old.pem);
    let client = Client::new(brain.target.clone(), "n1").tls(mine.client());
    assert!(timeout(LIMIT, client.watch().next()).await.unwrap().is_some());
    brain.files.write(&new.brain(), &new.pem);
    assert!(
        timeout(Duration::from_millis(300), client.watch().next()).await.is_err(),
        "the old one is no good"
    );
    let mut waiting = client.watch();
    assert!(timeout(Duration::from_millis(300), waiting.next()).await.is_err());
    mine.write(&new.node("n1"), &new.pem);
    assert!(timeout(LIMIT, waiting.next()).await.unwrap().is_some());
}

#[tokio::test]
async fn whoever_stalls_or_talks_nonsense_is_dropped_and_nobody_notices() {
    let ours = Authority::new("ours");
    let brain = Brain::start(&ours.brain(), &ours.pem, &[]).await;
    let mut stalled = Vec::new();
    // Nothing at all; the beginning of a TLS record; text; HTTP/2 without TLS; bytes of no kind.
    let nonsense: [&[u8]; 5] = [
        b"",
        b"\x16\x03\x01\x02",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &[0xfe; 600],
    ];
    for round in 0..40 {
        let mut stream = TcpStream::connect(brain.address()).await.unwrap();
        // The brain may hang up in the middle of it.
        let _ = stream.write_all(nonsense[round % nonsense.len()]).await;
        stalled.push(stream);
    }
    let pair = ours.node("n1");
    for _ in 0..5 {
        brain.ask(tls(&ours, Some(&pair)), "n1").await.unwrap();
    }
    let gone = async {
        for stream in &mut stalled {
            // Some are told why; all are at their end, this way or that.
            while matches!(stream.read(&mut [0; 1024]).await, Ok(1..)) {}
        }
    };
    within(Duration::from_secs(30), gone).await;
    brain.ask(tls(&ours, Some(&pair)), "n1").await.unwrap();
}

async fn within(limit: Duration, future: impl Future<Output = ()>) {
    timeout(limit, future).await.expect("it ends");
}

#[tokio::test]
async fn a_socket_of_this_host_needs_no_certificate() {
    let ours = Authority::new("ours");
    let files = Folder::new(&ours.brain(), &ours.pem);
    let tls = Arc::new(ServerTls::new(files.files(), []).unwrap());
    let folder = crate::common::Folder::new();
    let listener = Listener::bind_tls(&Target::Unix(folder.socket()), Some(tls)).await.unwrap();
    let publisher = Publisher::new("n1");
    publisher.publish(NodeState::default());
    let served = served(&publisher);
    let serving = tokio::spawn(grpc::serve(listener, served, async {}, std::future::pending()));
    // Nor does a client that has one show it there.
    let mine = Folder::new(&ours.node("n1"), &ours.pem);
    let client = Client::new(Target::Unix(folder.socket()), "n7").tls(mine.client());
    assert!(timeout(LIMIT, client.watch().next()).await.unwrap().is_some());
    serving.abort();
}

#[tokio::test]
async fn beyond_loopback_there_is_tls_or_nothing() {
    let ours = Authority::new("ours");
    let files = Folder::new(&ours.brain(), &ours.pem);
    let tls = Arc::new(ServerTls::new(files.files(), []).unwrap());
    let everywhere: Target = "0.0.0.0:0".parse().unwrap();
    Listener::bind_tls(&everywhere, Some(tls)).await.unwrap();
    let refused = Listener::bind(&everywhere).await.unwrap_err().to_string();
    assert!(refused.contains("--tls-cert, --tls-key and --tls-client-ca"), "{refused}");
}
