//! With real sockets.

use std::{net::Ipv4Addr, os::unix::fs::PermissionsExt as _};

use publish::Publisher;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::*;
use crate::{fixtures::apply, http::bind::bind, state::Role};

/// Serves at a free port of an address, and returns it.
async fn start(admin: &Admin, pages: PageGroup, address: SocketAddr) -> (Servers, SocketAddr) {
    // A port that was free a moment ago.
    let port = bind(address).unwrap().local_addr().unwrap().port();
    let address = SocketAddr::new(address.ip(), port);
    let servers = Servers::start().unwrap();
    servers.serve(admin, pages, address);
    (servers, address)
}

/// The head and body of the response to a request.
async fn raw(address: SocketAddr, request: &str) -> String {
    let mut stream = loop {
        match TcpStream::connect(address).await {
            Ok(stream) => break stream,
            Err(_) => yield_now().await,
        }
    };
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

async fn get(address: SocketAddr, path: &str) -> String {
    raw(address, &format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).await
}

fn local() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

#[tokio::test]
async fn pages_have_the_status_and_headers_of_kube_proxy() {
    let admin = Admin::new("n1", Role::Backend);
    let (_servers, health) = start(&admin, PageGroup::Health, local()).await;
    let response = get(health, "/healthz").await.to_lowercase();
    for it in ["http/1.1 200 ok", "content-type: application/json\r\n", "x-content-type-options: nosniff\r\n"]
    {
        assert!(response.contains(it), "{it} is not in {response}");
    }
    assert!(get(health, "/readyz").await.starts_with("HTTP/1.1 503 "));
    apply(&admin, &Publisher::new("n1"), []);
    assert!(get(health, "/readyz").await.contains("[+]state ok\n"));
    assert!(get(health, "/livez?verbose").await.starts_with("HTTP/1.1 200 "));
    assert!(get(health, "/metrics").await.starts_with("HTTP/1.1 404 "));
    let post = raw(health, "POST /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    assert!(post.starts_with("HTTP/1.1 405 "), "{post}");

    let (_servers, metrics) = start(&admin, PageGroup::Metrics, local()).await;
    let response = get(metrics, "/metrics").await;
    assert!(response.contains("text/plain; version=0.0.4"), "{response}");
    assert!(response.contains("kubeproxy_proxy_healthz_total{code=\"200\"} 1\n"), "{response}");
    assert!(get(metrics, "/proxyMode").await.ends_with("\r\n\r\nnftables"), "the socket path is off");
    admin.set_readers(|it| it.has_sockets = true);
    assert!(get(metrics, "/proxyMode").await.ends_with("\r\n\r\nebpf"));
    assert!(get(metrics, "/healthz").await.ends_with("\r\n\r\nok"));
    let flags = [("v", "4"), ("cluster-cidr", "10.0.0.0/8")]
        .map(|(name, it)| (name.to_owned(), it.to_owned()))
        .into();
    let fields = serde_json::json!({ "clusterCIDR": "10.0.0.0/8" });
    let configuration = crate::Configuration { table: String::new(), flags, fields };
    admin.set_readers(|it| it.configuration = configuration);
    for (path, text) in [
        ("/configz", "content-type: application/json\r\n"),
        ("/configz", "\r\n\r\n{\"kubeproxy.config.k8s.io\":{\"clusterCIDR\":\"10.0.0.0/8\"}}"),
        ("/flagz", "content-type: text/plain; charset=utf-8\r\n"),
        ("/flagz", "only.\n\ncluster-cidr=10.0.0.0/8\nv=4\n"),
        ("/statusz", "content-type: text/plain; charset=utf-8\r\n"),
        ("/statusz", "\nUp: 0 hr 00 min"),
        ("/healthz", "\r\n\r\nok"),
        ("/metrics/slis", "# TYPE kubernetes_healthcheck gauge\n"),
        ("/metrics/slis", "# TYPE kubernetes_healthchecks_total counter\n"),
        ("/metrics/slis", "\nkubernetes_healthcheck{name=\"programs\",type=\"readyz\"} 0\n"),
        ("/metrics/slis", "\nkubernetes_healthcheck{name=\"state\",type=\"readyz\"} 1\n"),
        ("/metrics/slis", "\nkubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n"),
        ("/metrics/slis", "_total{name=\"state\",status=\"error\",type=\"readyz\"} 1\n"),
        ("/metrics/slis", "_total{name=\"state\",status=\"success\",type=\"readyz\"} 1\n"),
        ("/metrics/slis", "_total{name=\"ping\",status=\"success\",type=\"healthz\"} 2\n"),
    ] {
        let response = get(metrics, path).await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
        assert!(response.contains(text), "{text} is not in {response}");
    }
}

#[tokio::test]
async fn the_status_pages_are_at_a_unix_socket_of_mode_0600_and_at_no_port() {
    let admin = Admin::new("n1", Role::Backend);
    for pages in [PageGroup::Probes, PageGroup::Health, PageGroup::Metrics] {
        let (_servers, address) = start(&admin, pages, local()).await;
        for path in ["/state", "/status"] {
            assert!(get(address, path).await.starts_with("HTTP/1.1 404 "), "{pages:?}: {path}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("folder/status.sock");
    let servers = Servers::start().unwrap();
    servers.serve_at_socket(&admin, PageGroup::Status, &path);
    let status = tokio::task::spawn_blocking(move || {
        loop {
            if let Ok(crate::Listener::Proxy(status)) = crate::query_status(&path) {
                let error = crate::get(&path, "/state").unwrap_err();
                assert_eq!(error.to_string(), "unexpected response", "there is no state yet");
                break (status, std::fs::metadata(&path).unwrap().permissions().mode());
            }
        }
    });
    let (status, mode) = status.await.unwrap();
    assert_eq!((&*status.node, mode & 0o777), ("n1", 0o600));
}

#[tokio::test]
async fn the_unspecified_address_of_ipv4_stands_for_both_families() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("skipped: there is no IPv6");
        return;
    }
    let admin = Admin::new("n1", Role::Backend);
    let (_servers, address) = start(&admin, PageGroup::Health, "0.0.0.0:0".parse().unwrap()).await;
    for ip in ["127.0.0.1", "::1"] {
        let response = get(SocketAddr::new(ip.parse().unwrap(), address.port()), "/livez").await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{ip}: {response}");
    }
}

#[tokio::test]
async fn every_probe_is_answered_while_others_hold_connections() {
    let admin = Admin::new("n1", Role::Backend);
    let (_servers, address) = start(&admin, PageGroup::Health, local()).await;
    let _ = get(address, "/livez").await;
    let mut held = Vec::new();
    for _ in 0..700 {
        let mut silent = TcpStream::connect(address).await.unwrap();
        // It may have been closed already.
        let _ = silent.write_all(b"GET /livez HTTP/1.1\r\n").await;
        held.push(silent);
    }
    for path in ["/livez", "/healthz"] {
        assert!(get(address, path).await.starts_with("HTTP/1.1 200 "));
    }
    let health = admin.connections.of(PageGroup::Health);
    assert!(health.count() <= health.limits().per_source + 1, "{} connections", health.count());
    assert!(health.closed() >= 600, "{} were closed", health.closed());
}

#[tokio::test]
async fn a_client_that_sends_no_request_is_disconnected() {
    let admin = Admin::new("n1", Role::Backend);
    let (_servers, address) = start(&admin, PageGroup::Probes, local()).await;
    // Without the rest of its head.
    assert_eq!(raw(address, "GET /livez HTTP/1.1\r\n").await, "");
}

#[tokio::test]
async fn invalid_requests_are_rejected() {
    let admin = Admin::new("n1", Role::Backend);
    let (_servers, address) = start(&admin, PageGroup::Health, local()).await;
    let long = format!("GET /livez HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(2 * MAX_HEAD));
    for request in ["\0\0\0\0\r\n\r\n", "GET\r\n\r\n", &long] {
        let response = raw(address, request).await;
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 4"), "{response}");
    }
    assert!(get(address, "/livez").await.starts_with("HTTP/1.1 200 "));
}
