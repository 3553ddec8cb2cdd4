//! What the fuzz targets call: a client that sends arbitrary bytes to the pages.

use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

use crate::{Admin, PageGroup, Role, http::server::serve_one};

/// The most that a response of these pages has, in bytes.
const MAX_RESPONSE: usize = 1 << 20;

/// The pages of a process that has just started, and which answers questions with their words.
pub struct Pages(Admin);

impl Default for Pages {
    fn default() -> Self {
        let admin = Admin::new("n1", Role::Backend);
        admin.set_readers(|it| {
            it.explainer = Some(Arc::new(|words| Box::pin(async move { Ok(format!("{words:?}")) })));
            it.tracer = Some(Arc::new(|filters| Box::pin(async move { Err(format!("{filters:?}")) })));
        });
        Self(admin)
    }
}

impl Pages {
    /// Sends bytes to a group of pages, and reads until the server is done: it says what it says in HTTP.
    pub async fn send(&self, group: u8, bytes: &[u8]) {
        let group = PageGroup::ALL[usize::from(group) % PageGroup::ALL.len()];
        let (mut client, server) = duplex(MAX_RESPONSE);
        let serve = serve_one(&self.0, group, self.0.connections.of(PageGroup::Status), server);
        let ask = async {
            // The server may have closed the connection.
            let _ = client.write_all(bytes).await;
            let _ = client.shutdown().await;
            let mut response = Vec::new();
            let _ = client.read_to_end(&mut response).await;
            response
        };
        let (response, ()) = tokio::join!(ask, serve);
        assert!(response.len() < MAX_RESPONSE);
        assert!(response.is_empty() || response.starts_with(b"HTTP/1."), "a response in HTTP");
        assert!(!response.starts_with(b"HTTP/1.1 500"), "a client causes no error of the server");
    }
}
