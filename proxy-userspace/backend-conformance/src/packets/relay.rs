//! A TCP port in the network of a backend that leads to the Unix socket of its brain: not every system has those.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
};

use tokio::{
    io::copy_bidirectional,
    net::UnixStream,
    runtime::{Builder, Runtime},
};

/// A running relay; it ends when this is dropped.
pub(super) struct Relay {
    address: SocketAddr,
    _runtime: Runtime,
}

impl Relay {
    /// Leads connections to `listener` to the socket `brain`; they end where there is no brain.
    pub(super) fn start(listener: TcpListener, brain: PathBuf) -> io::Result<Self> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_io().build()?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        runtime.spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let Ok(mut brain) = UnixStream::connect(&brain).await else { continue };
                tokio::spawn(async move { copy_bidirectional(&mut client, &mut brain).await });
            }
        });
        Ok(Self { address, _runtime: runtime })
    }

    /// The address, as the target of a client.
    pub(super) fn target(&self) -> String {
        format!("tcp://{}", self.address)
    }
}
