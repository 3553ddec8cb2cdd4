//! TCP: each accepted connection is joined to one to an endpoint.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use socket2::SockRef;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

use crate::{frontend::Address, table::Table};

/// How long a connection to an endpoint may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How many endpoints are tried for a connection.
const MAX_ATTEMPTS: usize = 3;
/// After a failure to accept, as for want of files.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Accepts until it is aborted; accepted connections continue.
pub(crate) async fn serve(listener: TcpListener, address: Address, table: Arc<Table>) {
    loop {
        match listener.accept().await {
            Ok((client, source)) => {
                tokio::spawn(join(client, source, address, Arc::clone(&table)));
            }
            Err(error) => {
                table.warn(|| format!("{address}: accepting a connection failed: {error}; retrying"));
                sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

async fn join(mut client: TcpStream, source: SocketAddr, address: Address, table: Arc<Table>) {
    match connect(&client, source, &address, &table).await {
        Some(mut endpoint) => {
            let nodelay = [client.set_nodelay(true), endpoint.set_nodelay(true)];
            // What fails there is a connection that has ended; and each side sees how the other one ended.
            let _ = (nodelay, copy_bidirectional(&mut client, &mut endpoint).await);
        }
        // A reset is as near to a refusal as an accepted connection comes.
        None => drop(SockRef::from(&client).set_linger(Some(Duration::ZERO))),
    }
}

async fn connect(
    client: &TcpStream,
    source: SocketAddr,
    address: &Address,
    table: &Table,
) -> Option<TcpStream> {
    let is_inside = table.is_inside(source.ip(), client.local_addr().ok()?.ip());
    let frontend = table.get(address)?;
    for endpoint in frontend.candidates(source.ip(), is_inside).into_iter().take(MAX_ATTEMPTS) {
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(endpoint)).await {
            Ok(Ok(stream)) => {
                frontend.chosen(source.ip(), endpoint);
                return Some(stream);
            }
            Ok(Err(error)) => {
                table.warn(|| format!("{address}: connecting to {endpoint} failed: {error}"));
            }
            Err(_) => {
                table.warn(|| format!("{address}: {endpoint} does not answer within {CONNECT_TIMEOUT:?}"));
            }
        }
    }
    None
}
