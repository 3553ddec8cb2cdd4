//! Error responses of the server, and unusable client configurations.

use std::fs;

use api_server::{ApiServer, Fault, Resource, Settings, Verb};
use source::kube::{ClientConfig, KubeSource};

use super::source_test::{
    ALWAYS, SourceTest, at, has_error, options, paging, server, status, with_kubeconfig,
};

#[tokio::test]
async fn a_failed_list_or_watch_is_reported_and_retried_and_removes_nothing() {
    let forbidden = "services is forbidden: User \"system:anonymous\" cannot list resource \"services\"";
    let cases: [(_, &[&str]); 3] = [
        (
            status(403, forbidden),
            &["services: 403 Forbidden", "system:anonymous", "ClusterRole", "list and watch"],
        ),
        (status(500, "etcdserver: request timed out"), &["services: 500", "etcdserver: request timed out"]),
        (Fault::NoResponse, &["services: no response within"]),
    ];
    for (fault, words) in cases {
        // As the beginning of a watch, and in pages.
        let lists = [(Settings::default(), &[Verb::Watch, Verb::List][..]), (paging(), &[Verb::List])];
        for (settings, verbs) in lists {
            let server = server(settings);
            for it in verbs {
                server.inject_fault(Resource::Services, *it, ALWAYS, fault.clone());
            }
            let mut test = SourceTest::follow(&server);
            test.wait_for(has_error(0, words)).await;
            assert!(!test.is_synced());
            server.clear_faults();
            test.next().await;
            assert!(test.service("web").is_some());
            // After the first list.
            server.inject_fault(Resource::Services, Verb::Watch, ALWAYS, fault.clone());
            server.disconnect_all();
            test.wait_for(has_error(0, &words[..1])).await;
            assert!(test.service("web").is_some());
            server.clear_faults();
            test.receives_other(&server).await;
        }
    }
}

#[tokio::test]
async fn retry_after_is_respected() {
    let server = server(Settings::default());
    let busy = Fault::Status { code: 429, message: "busy".into(), retry_after: Some(2) };
    server.inject_fault(Resource::Services, Verb::Watch, 1, busy);
    let start = std::time::Instant::now();
    let mut test = SourceTest::follow(&server);
    test.wait_for(has_error(0, &["429 Too Many Requests"])).await;
    test.next().await;
    // A lower limit, so that a slow machine does not matter.
    assert!(start.elapsed().as_secs() >= 2);
}

#[tokio::test]
async fn an_expired_token_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(Settings { token: Some("first".into()), ..Settings::default() });
    let kubeconfig = server.kubeconfig(folder.path()).unwrap();
    let mut test = SourceTest::started(&options(with_kubeconfig(kubeconfig))).await;
    server.configure(|it| it.token = Some("second".into()));
    server.disconnect_all();
    test.wait_for(has_error(0, &["401 Unauthorized", "token"])).await;
    fs::write(folder.path().join("token"), "second\n").unwrap();
    test.receives_other(&server).await;
}

#[tokio::test]
async fn tls_works_with_the_right_ca_and_reports_a_wrong_one() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(Settings { is_tls: true, token: Some("t".into()), ..Settings::default() });
    let access = with_kubeconfig(server.kubeconfig(folder.path()).unwrap());
    let test = SourceTest::started(&options(access.clone())).await;
    assert!(test.service("web").is_some());

    // A wrong CA, until it is corrected: files are read again.
    let right = fs::read_to_string(folder.path().join("ca.crt")).unwrap();
    let other = ApiServer::start(Settings { is_tls: true, ..Settings::default() }).unwrap();
    let other_folder = tempfile::tempdir().unwrap();
    other.kubeconfig(other_folder.path()).unwrap();
    fs::copy(other_folder.path().join("ca.crt"), folder.path().join("ca.crt")).unwrap();
    let mut test = SourceTest::start(&options(access));
    test.wait_for(has_error(0, &["invalid peer certificate", "certificate-authority"])).await;
    fs::write(folder.path().join("ca.crt"), right).unwrap();
    test.next().await;
    assert!(test.service("web").is_some());
}

#[tokio::test]
async fn the_servers_url_overrides_the_kubeconfig() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(Settings { token: Some("t".into()), ..Settings::default() });
    let path = server.kubeconfig(folder.path()).unwrap();
    let text = fs::read_to_string(&path).unwrap().replace(&server.url(), "https://192.0.2.1:6443");
    fs::write(&path, text).unwrap();
    let access = ClientConfig { kubeconfig: Some(path.into()), ..at(&server) };
    let test = SourceTest::started(&options(access)).await;
    assert!(test.service("web").is_some());
}

#[tokio::test]
async fn an_unusable_kubeconfig_is_reported_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let check = |text: Option<&str>, words: &[&str]| {
        let path = folder.path().join("kubeconfig");
        let _ = fs::remove_file(&path);
        if let Some(text) = text {
            fs::write(&path, text).unwrap();
        }
        let error = KubeSource::start(&options(with_kubeconfig(path))).unwrap_err().to_string();
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
async fn an_invalid_server_url_is_rejected() {
    for text in ["192.0.2.1:6443", "ftp://192.0.2.1", "https://"] {
        let access = ClientConfig { server: Some(text.into()), ..ClientConfig::default() };
        let error = KubeSource::start(&options(access)).unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("https://192.0.2.1:6443"), "{error}");
    }
}
