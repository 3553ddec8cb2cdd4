//! A server that refuses, and configurations that cannot work.

use std::fs;

use api_server::{ApiServer, Fault, Resource, Settings, Verb};
use source::kube::{ClientConfig, KubeSource, Options};

use super::common::{QUICK, World, complains, has_service, server, service};

fn options(access: ClientConfig) -> Options {
    Options { client_config: access, timing: QUICK, ..Options::default() }
}

fn status(code: u16, message: &str) -> Fault {
    Fault::Status { code, message: message.into(), retry_after: None }
}

/// Follows a server that troubles the first few requests, and waits for the complaint and then for the facts.
async fn check(trouble: Fault, words: &'static [&'static str]) {
    let server = server(Settings::default());
    server.inject_fault(Resource::Services, Verb::Watch, 1000, trouble);
    let mut world = World::follow(&server);
    world.eventually(complains(0, words)).await;
    assert!(!world.health.is_synced());
    server.clear_faults();
    world.next().await;
    assert!(world.service("web").is_some());
}

#[tokio::test]
async fn a_forbidden_watch_is_named_with_its_remedy_and_tried_again() {
    let said = "services is forbidden: User \"system:anonymous\" cannot list resource \"services\"";
    check(
        status(403, said),
        &["services: 403 Forbidden", "system:anonymous", "ClusterRole", "list and watch"],
    )
    .await;
}

#[tokio::test]
async fn an_internal_error_is_tried_again() {
    check(status(500, "etcdserver: request timed out"), &["500", "etcdserver: request timed out"]).await;
}

#[tokio::test]
async fn a_server_that_wants_to_be_left_alone_is_left_alone_for_that_long() {
    let server = server(Settings::default());
    let busy = Fault::Status { code: 429, message: "busy".into(), retry_after: Some(2) };
    server.inject_fault(Resource::Services, Verb::Watch, 1, busy);
    let began = std::time::Instant::now();
    let mut world = World::follow(&server);
    world.eventually(complains(0, &["429 Too Many Requests"])).await;
    world.next().await;
    // Not a limit that a slow machine could miss: it must not have come earlier.
    assert!(began.elapsed().as_secs() >= 2);
}

#[tokio::test]
async fn a_refusal_later_takes_nothing_away() {
    let server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    server.inject_fault(Resource::Services, Verb::Watch, 1000, status(403, "no longer"));
    server.disconnect_all();
    world.eventually(complains(0, &["403"])).await;
    assert!(world.service("web").is_some());
    server.clear_faults();
    server.set(service("other", "10.96.0.11"));
    world.until(has_service("other")).await;
}

#[tokio::test]
async fn a_token_that_expires_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(Settings { token: Some("first".into()), ..Settings::default() });
    let kubeconfig = server.kubeconfig(folder.path()).unwrap();
    let mut world = World::start(&options(ClientConfig {
        kubeconfig: Some(kubeconfig.into()),
        ..ClientConfig::default()
    }));
    world.next().await;
    server.configure(|it| it.token = Some("second".into()));
    server.disconnect_all();
    world.eventually(complains(0, &["401 Unauthorized", "token"])).await;
    fs::write(folder.path().join("token"), "second\n").unwrap();
    server.set(service("other", "10.96.0.11"));
    world.until(has_service("other")).await;
}

#[tokio::test]
async fn tls_with_the_cas_certificate_works_and_without_it_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(Settings { is_tls: true, token: Some("t".into()), ..Settings::default() });
    let path = server.kubeconfig(folder.path()).unwrap();
    let access = ClientConfig { kubeconfig: Some(path.clone().into()), ..ClientConfig::default() };
    let mut world = World::start(&options(access.clone()));
    world.next().await;
    assert!(world.service("web").is_some());

    // The CA of somebody else, until it is put right: files are read again.
    let right = fs::read_to_string(folder.path().join("ca.crt")).unwrap();
    let other = ApiServer::start(Settings { is_tls: true, ..Settings::default() }).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    other.kubeconfig(elsewhere.path()).unwrap();
    fs::copy(elsewhere.path().join("ca.crt"), folder.path().join("ca.crt")).unwrap();
    let mut world = World::start(&options(access));
    world.eventually(complains(0, &["invalid peer certificate", "certificate-authority"])).await;
    fs::write(folder.path().join("ca.crt"), right).unwrap();
    world.next().await;
    assert!(world.service("web").is_some());
}

#[tokio::test]
async fn the_servers_address_can_be_another_than_the_kubeconfigs() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(Settings { token: Some("t".into()), ..Settings::default() });
    let path = server.kubeconfig(folder.path()).unwrap();
    let text = fs::read_to_string(&path).unwrap().replace(&server.url(), "https://192.0.2.1:6443");
    fs::write(&path, text).unwrap();
    let access = ClientConfig { kubeconfig: Some(path.into()), server: Some(server.url()) };
    let mut world = World::start(&options(access));
    world.next().await;
    assert!(world.service("web").is_some());
}

#[tokio::test]
async fn a_kubeconfig_that_cannot_work_is_named_with_what_would_do() {
    let folder = tempfile::tempdir().unwrap();
    let check = |text: Option<&str>, words: &[&str]| {
        let path = folder.path().join("kubeconfig");
        let _ = fs::remove_file(&path);
        if let Some(text) = text {
            fs::write(&path, text).unwrap();
        }
        let access = ClientConfig { kubeconfig: Some(path.into()), ..ClientConfig::default() };
        let error = KubeSource::start(&options(access)).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        for word in words {
            assert!(error.contains(word), "{word} is not in {error}");
        }
    };
    check(None, &["kubeconfig", "No such file", "--kubeconfig"]);
    check(Some("{"), &["kubeconfig", "parse", "kubectl config view --raw"]);
    check(Some("apiVersion: v1\nkind: Config\n"), &["current context", "use-context"]);
    let context = "current-context: c\ncontexts: [{name: c, context: {cluster: k}}]\n";
    check(Some(context), &["cluster", "in the file"]);
    let clusters = |it: &str| format!("{context}clusters: [{{name: k, cluster: {it}}}]\n");
    check(Some(&clusters("{}")), &["https://192.0.2.1:6443"]);
    check(Some(&clusters("{server: nowhere}")), &["nowhere", "https://192.0.2.1:6443"]);
    check(
        Some(&clusters("{server: 'https://192.0.2.1', certificate-authority: /no/such/ca.crt}")),
        &["/no/such/ca.crt"],
    );
}

#[tokio::test]
async fn an_address_that_is_none_is_refused() {
    for text in ["192.0.2.1:6443", "ftp://192.0.2.1", "https://"] {
        let access = ClientConfig { server: Some(text.into()), ..ClientConfig::default() };
        let error = KubeSource::start(&options(access)).unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("https://192.0.2.1:6443"), "{error}");
    }
}
