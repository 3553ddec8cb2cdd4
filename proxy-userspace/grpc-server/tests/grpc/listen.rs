//! Listening sockets, health and reflection.

use std::{
    fs,
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _},
        net::UnixListener,
    },
};

use grpc_server::{ListenError, Listener};
use listeners::SocketAccess;
use model::state::NodeState;
use proxy_contract::{Target, client::Client};
use publish::{Publisher, SingleNode};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::{
    v1::{self, server_reflection_client::ServerReflectionClient},
    v1alpha::{self, server_reflection_client::ServerReflectionClient as ServerReflectionClientV1Alpha},
};

use crate::{
    common::{Brain, Folder, channel, serve},
    peer::NodePeer,
};

#[tokio::test]
async fn a_unix_socket_has_mode_0600_and_is_removed_on_drop() {
    let folder = Folder::new();
    let socket = folder.socket().with_file_name("a/directory/proxy.sock");
    let listener = Listener::bind(&Target::Unix(socket.clone())).await.unwrap();
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    drop(listener);
    assert!(!socket.exists());
}

#[tokio::test]
async fn a_group_may_connect_if_it_is_allowed_to() {
    let folder = Folder::new();
    // Root may choose any group.
    let metadata = fs::metadata(folder.socket().parent().unwrap()).unwrap();
    let group = if metadata.uid() == 0 { 4711 } else { metadata.gid() };
    let access = SocketAccess { mode: 0o660, group: Some(group) };
    let _listener = Listener::bind_for(&Target::Unix(folder.socket()), None, access).await.unwrap();
    let metadata = fs::metadata(folder.socket()).unwrap();
    assert_eq!((metadata.mode() & 0o777, metadata.gid()), (0o660, group));
}

#[tokio::test]
async fn a_stale_socket_is_replaced() {
    let folder = Folder::new();
    drop(UnixListener::bind(folder.socket()).unwrap());
    assert!(folder.socket().exists());
    let brain = Brain::start(&folder).await;
    brain.publisher.publish(NodeState::default());
    assert!(NodePeer::start(&folder, "n1").await.change_set().await.is_empty());
    brain.stop().await;
    assert!(!folder.socket().exists());
}

#[tokio::test]
async fn a_socket_in_use_is_an_error_and_stays() {
    let (folder, _brain) = Brain::serving(NodeState::default()).await;
    let error = Listener::bind(&Target::Unix(folder.socket())).await.unwrap_err();
    assert!(error.to_string().contains("another process listens there"), "{error}");
    assert!(NodePeer::start(&folder, "n1").await.change_set().await.is_empty());
}

#[tokio::test]
async fn a_file_that_is_not_a_socket_stays() {
    let folder = Folder::new();
    fs::write(folder.socket(), "precious").unwrap();
    let error = Listener::bind(&Target::Unix(folder.socket())).await.unwrap_err();
    assert!(error.to_string().contains("exists and is not a socket"), "{error}");
    assert_eq!(fs::read_to_string(folder.socket()).unwrap(), "precious");
}

#[tokio::test]
async fn a_socket_that_has_replaced_ours_stays() {
    let folder = Folder::new();
    let first = Listener::bind(&Target::Unix(folder.socket())).await.unwrap();
    fs::remove_file(folder.socket()).unwrap();
    let second = Listener::bind(&Target::Unix(folder.socket())).await.unwrap();
    drop(first);
    assert!(folder.socket().exists());
    drop(second);
    assert!(!folder.socket().exists());
}

#[tokio::test]
async fn without_tls_only_loopback_addresses_are_allowed() {
    for text in ["127.0.0.1:0", "tcp://localhost:0", "[::1]:0"] {
        let listener = Listener::bind(&text.parse().unwrap()).await.unwrap();
        assert!(!listener.address().to_string().ends_with(":0"), "{}", listener.address());
    }
    for text in ["0.0.0.0:0", "[::]:0", "tcp://192.0.2.1:0"] {
        let error = Listener::bind(&text.parse().unwrap()).await.unwrap_err();
        assert!(matches!(error, ListenError::NotLoopback { .. }));
        let text = "mutual TLS is required; set --tls-cert, --tls-key and --tls-client-ca";
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[tokio::test]
async fn a_brain_serves_at_a_tcp_port() {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).await.unwrap();
    let target = listener.address().clone();
    let publisher = Publisher::new("n1");
    publisher.publish(NodeState::default());
    serve(listener, SingleNode::new("n1", publisher.subscribe()));
    let state = Client::new(target.into(), "n1").watch().next().await;
    assert!(state.services.is_empty());
}

#[tokio::test]
async fn health_is_serving_once_there_is_a_state() {
    let (folder, brain) = Brain::new().await;
    let mut health = HealthClient::new(channel(&folder).await);
    let mut updates = health.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    let mut status = async || updates.message().await.unwrap().unwrap().status();
    assert_eq!(status().await, ServingStatus::NotServing);
    brain.publisher.publish(NodeState::default());
    assert_eq!(status().await, ServingStatus::Serving);
    for service in ["localv1.Sets", "globalv1.Sets", "localnetv1.Endpoints"] {
        let status = health.check(HealthCheckRequest { service: service.into() }).await.unwrap();
        assert_eq!(status.into_inner().status(), ServingStatus::Serving, "{service}");
    }
}

#[tokio::test]
async fn a_brain_that_stops_without_a_state_was_never_serving() {
    let (folder, brain) = Brain::new().await;
    let mut health = HealthClient::new(channel(&folder).await);
    let mut updates = health.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(updates.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    brain.stop().await;
    while let Ok(Some(it)) = updates.message().await {
        assert_ne!(it.status(), ServingStatus::Serving);
    }
}

#[tokio::test]
async fn reflection_lists_the_services_and_their_messages() {
    let (folder, _brain) = Brain::new().await;
    let channel = channel(&folder).await;

    use v1::{server_reflection_request::MessageRequest, server_reflection_response::MessageResponse};
    let request = |it| v1::ServerReflectionRequest { host: String::new(), message_request: Some(it) };
    let requests = [
        request(MessageRequest::ListServices(String::new())),
        request(MessageRequest::FileContainingSymbol("localv1.Sets".into())),
        request(MessageRequest::FileContainingSymbol("globalv1.NodeInfo".into())),
        request(MessageRequest::FileContainingSymbol("localnetv1.NextFilter".into())),
        request(MessageRequest::FileContainingSymbol("grpc.health.v1.Health".into())),
    ];
    let mut reflection = ServerReflectionClient::new(channel.clone());
    let answers = reflection.server_reflection_info(tokio_stream::iter(requests)).await.unwrap();
    let mut answers = answers.into_inner();
    let mut answer = async || answers.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = answer().await else { panic!("no list") };
    let names: Vec<_> = list.service.iter().map(|it| it.name.as_str()).collect();
    for name in ["localv1.Sets", "globalv1.Sets", "localnetv1.Endpoints", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }
    for _ in 0..4 {
        assert!(matches!(answer().await, MessageResponse::FileDescriptorResponse(_)));
    }

    use v1alpha::server_reflection_request::MessageRequest as OldRequest;
    let request = v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(OldRequest::ListServices(String::new())),
    };
    let mut reflection = ServerReflectionClientV1Alpha::new(channel);
    let answers = reflection.server_reflection_info(tokio_stream::iter([request])).await.unwrap();
    assert!(answers.into_inner().message().await.unwrap().is_some());
}
