//! Credentials of a plugin.

use std::fs;

use api_server::{ApiServer, Settings};
use source::kube::ClientConfig;
use tempfile::TempDir;

use super::source_test::{SourceTest, has_error, has_service, options, server, service, with_kubeconfig};

/// A plugin whose first run gives the token `first`; the others give `second`, once they are let.
pub(crate) struct Plugin(TempDir);

/// The client library renews a token in its last minute: not before the first requests are sent, also on a busy machine.
const SOON: &str = "65 seconds";

impl Plugin {
    /// The first token ends at a time in the notation of date(1).
    pub(crate) fn new(end: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = format!(
            "cd '{}'\necho >> runs\nif [ $(wc -l < runs) = 1 ]; then token=first end='{end}'\nelse token=second end='1 \
             hour'; while [ -e runs -a ! -e allowed ]; do sleep 0.05; done; fi\nend=$(date -u -d \"$end\" +%Y-%m-%dT%H:%M:%SZ)\necho \
             \"{{\\\"apiVersion\\\": \\\"client.authentication.k8s.io/v1\\\", \\\"kind\\\": \\\"ExecCredential\\\", \
             \\\"status\\\": {{\\\"token\\\": \\\"$token\\\", \\\"expirationTimestamp\\\": \\\"$end\\\"}}}}\"\n",
            folder.path().display()
        );
        fs::write(folder.path().join("plugin"), script).unwrap();
        Self(folder)
    }

    /// The configuration of a client that asks this plugin.
    pub(crate) fn access(&self, server: &ApiServer) -> ClientConfig {
        let path = server.kubeconfig(self.0.path()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let plugin = self.0.path().join("plugin");
        let exec = format!(
            "exec: {{apiVersion: client.authentication.k8s.io/v1, command: sh, args: ['{}'], interactiveMode: Never}}",
            plugin.display()
        );
        let token = format!("tokenFile: {}", self.0.path().join("token").display());
        assert!(text.contains(&token), "{text}");
        fs::write(&path, text.replace(&token, &exec)).unwrap();
        with_kubeconfig(path)
    }

    pub(crate) fn runs(&self) -> usize {
        fs::read_to_string(self.0.path().join("runs")).map_or(0, |it| it.lines().count())
    }

    fn allow(&self) {
        fs::write(self.0.path().join("allowed"), "").unwrap();
    }
}

#[tokio::test]
async fn nothing_waits_for_a_plugin_that_renews_credentials() {
    let plugin = Plugin::new(SOON);
    let server = server(Settings { token: Some("first".into()), ..Settings::default() });
    let mut test = SourceTest::started(&options(plugin.access(&server))).await;
    test.wait_for(|_| plugin.runs() == 2).await;
    // All watches begin anew while it runs.
    server.disconnect_all();
    test.receives_other(&server).await;

    server.configure(|it| it.token = Some("second".into()));
    plugin.allow();
    server.disconnect_all();
    server.set(service("third", "10.96.0.12"));
    test.until(has_service("third")).await;
}

#[tokio::test]
async fn a_plugin_that_fails_is_named() {
    let plugin = Plugin::new(SOON);
    let server = server(Settings { token: Some("first".into()), ..Settings::default() });
    let access = plugin.access(&server);
    let mut test = SourceTest::started(&options(access)).await;
    fs::write(plugin.0.path().join("plugin"), "echo broken >&2; exit 3").unwrap();
    server.configure(|it| it.token = Some("third".into()));
    server.disconnect_all();
    test.wait_for(has_error(0, &["sh", "broken"])).await;
}
