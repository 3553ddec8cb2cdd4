//! Proxies between the node and the API server, which see bytes and connections only.

use std::{
    fs,
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use api_server::Settings;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpStream},
};

use super::source_test::{SourceTest, options, server, with_kubeconfig};

/// How a proxy is spoken to.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Http,
    Socks5,
}

/// A proxy on a free port, and how many connections it has made.
async fn start(kind: Kind) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, made) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&made);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let count = Arc::clone(&count);
            tokio::spawn(async move { connect(client, kind, &count).await });
        }
    });
    (address, made)
}

async fn connect(mut client: TcpStream, kind: Kind, made: &AtomicUsize) -> io::Result<()> {
    let (to, done) = match kind {
        Kind::Http => {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(client.read_u8().await?);
            }
            let head = String::from_utf8(head).map_err(io::Error::other)?;
            let to = head.strip_prefix("CONNECT ").and_then(|it| it.split(' ').next());
            let to = to.and_then(|it| it.parse::<SocketAddr>().ok()).ok_or(ErrorKind::InvalidData)?;
            // Of `user:secret`.
            if !head.to_ascii_lowercase().contains("proxy-authorization: basic ") {
                client.write_all(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n").await?;
                return Ok(());
            }
            (to, &b"HTTP/1.1 200 OK\r\n\r\n"[..])
        }
        Kind::Socks5 => {
            // Version and methods; then version, command, a zero, the type of the address, the address and the port.
            let (_, methods) = (client.read_u8().await?, client.read_u8().await?);
            client.read_exact(&mut vec![0; methods.into()]).await?;
            client.write_all(&[5, 0]).await?;
            let mut request = [0; 10];
            client.read_exact(&mut request).await?;
            let [.., a, b, c, d, high, low] = request;
            let to = SocketAddr::from(([a, b, c, d], u16::from_be_bytes([high, low])));
            (to, &[5, 0, 0, 1, 0, 0, 0, 0, 0, 0][..])
        }
    };
    let mut server = TcpStream::connect(to).await?;
    made.fetch_add(1, Ordering::Relaxed);
    client.write_all(done).await?;
    copy_bidirectional(&mut client, &mut server).await.map(drop)
}

#[tokio::test]
async fn an_api_server_is_followed_through_the_proxy_of_its_kubeconfig() {
    let folder = tempfile::tempdir().unwrap();
    for (kind, scheme) in [(Kind::Http, "http://user:secret@"), (Kind::Socks5, "socks5://")] {
        let server = server(Settings { is_tls: true, ..Settings::default() });
        let (proxy, made) = start(kind).await;
        let kubeconfig = server.kubeconfig(folder.path()).unwrap();
        let text = fs::read_to_string(&kubeconfig).unwrap();
        let proxied = text.replace("    server:", &format!("    proxy-url: {scheme}{proxy}\n    server:"));
        fs::write(&kubeconfig, proxied).unwrap();
        let mut test = SourceTest::started(&options(with_kubeconfig(kubeconfig))).await;
        assert!(made.load(Ordering::Relaxed) > 0, "{kind:?}");
        // The connections of a watch are lost and made again through it.
        let before = made.load(Ordering::Relaxed);
        server.disconnect_all();
        test.receives_other(&server).await;
        assert!(made.load(Ordering::Relaxed) > before, "{kind:?}");
    }
}
