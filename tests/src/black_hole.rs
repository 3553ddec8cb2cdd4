//! An endpoint that does not answer.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result};
use socket2::{Domain, Socket, Type};

use crate::EchoServer;

/// An endpoint that answers no SYN: its queue of connections is full, until it is emptied.
#[derive(Debug)]
pub struct BlackHole {
    listener: TcpListener,
    _queued: Vec<Socket>,
}

impl BlackHole {
    /// Listens in the network namespace of the calling thread.
    #[must_use]
    #[track_caller]
    pub fn at(address: SocketAddr) -> Self {
        let hole = Self::listen(address).expect("the address can be bound");
        assert!(TcpStream::connect_timeout(&address, Duration::from_millis(300)).is_err());
        hole
    }

    fn listen(address: SocketAddr) -> Result<Self> {
        let new = || Socket::new(Domain::IPV4, Type::STREAM, None);
        let socket = new()?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into()).with_context(|| format!("cannot bind {address}"))?;
        socket.listen(0)?;
        let mut queued = Vec::new();
        for _ in 0..2 {
            let socket = new()?;
            socket.set_nonblocking(true)?;
            let _ = socket.connect(&address.into());
            queued.push(socket);
        }
        Ok(Self { listener: socket.into(), _queued: queued })
    }

    /// Answers from now on.
    pub fn heal(self) -> Result<EchoServer> {
        let Self { listener, _queued } = self;
        let address = listener.local_addr()?;
        drop((listener, _queued));
        EchoServer::start("healed", address)
    }
}
