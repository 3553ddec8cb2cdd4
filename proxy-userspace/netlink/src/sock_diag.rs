//! Lists and terminates the connected TCP and UDP sockets of a network namespace (`NETLINK_SOCK_DIAG`).
//!
//! Invariant: a socket is terminated by its cookie, so that it cannot be mistaken for another one.

use std::{io, net::SocketAddr, os::fd::OwnedFd};

use netlink_packet_core::{Emitable as _, NLM_F_ACK, NLM_F_DUMP, Parseable as _};
use netlink_packet_sock_diag::{
    AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP, SOCK_DESTROY, SOCK_DIAG_BY_FAMILY,
    inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags},
};
use nix::{
    libc,
    sys::{
        socket::{SockFlag, SockProtocol, setsockopt, sockopt::ReceiveTimeout},
        time::{TimeVal, TimeValLike as _},
    },
};

use crate::socket::{ask, open};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    Tcp,
    Udp,
}

impl Transport {
    fn number(self) -> u8 {
        match self {
            Self::Tcp => IPPROTO_TCP,
            Self::Udp => IPPROTO_UDP,
        }
    }

    /// The states of a connected socket, as long as its program can still send or receive.
    fn connected_states(self) -> StateFlags {
        match self {
            Self::Tcp => {
                StateFlags::SYN_SENT
                    | StateFlags::ESTABLISHED
                    | StateFlags::FIN_WAIT1
                    | StateFlags::FIN_WAIT2
                    | StateFlags::CLOSE_WAIT
            }
            Self::Udp => StateFlags::ESTABLISHED,
        }
    }

    fn unsupported(self) -> io::Error {
        let (name, module, option) = match self {
            Self::Tcp => ("TCP", "tcp_diag", "CONFIG_INET_TCP_DIAG"),
            Self::Udp => ("UDP", "udp_diag", "CONFIG_INET_UDP_DIAG"),
        };
        let text = format!(
            "this kernel cannot list {name} sockets (load the module {module}, or use a kernel with {option})"
        );
        io::Error::new(io::ErrorKind::Unsupported, text)
    }
}

#[derive(Clone, Debug)]
pub struct ConnectedSocket {
    family: u8,
    transport: Transport,
    id: SocketId,
}

impl ConnectedSocket {
    /// The socket of an answer to a request for this family and transport.
    pub(crate) fn new(family: u8, transport: Transport, it: InetResponse) -> Self {
        Self { family, transport, id: it.header.socket_id }
    }

    pub fn cookie(&self) -> u64 {
        // Two words in native byte order, the lower half first.
        let [a, b, c, d, e, f, g, h] = self.id.cookie;
        u64::from(u32::from_ne_bytes([a, b, c, d])) | u64::from(u32::from_ne_bytes([e, f, g, h])) << 32
    }

    /// The address that the kernel sends its packets to; a v4-mapped one as IPv4.
    pub fn peer(&self) -> SocketAddr {
        SocketAddr::new(self.id.destination_address.to_canonical(), self.id.destination_port)
    }
}

/// A socket to sock_diag, in the network namespace in which it was opened.
#[derive(Debug)]
pub struct SockDiag(OwnedFd);

impl SockDiag {
    /// Opens one in the namespace of the calling thread.
    pub fn open() -> io::Result<Self> {
        let socket = open(SockProtocol::NetlinkSockDiag, 0, SockFlag::empty())?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(5))?;
        Ok(Self(socket))
    }

    pub fn connected(&self, transport: Transport) -> io::Result<Vec<ConnectedSocket>> {
        let mut found = Vec::new();
        for family in [AF_INET, AF_INET6] {
            let (id, states) = (unspecified(family), transport.connected_states());
            let add = |it| found.push(ConnectedSocket::new(family, transport, it));
            match self.ask((SOCK_DIAG_BY_FAMILY, NLM_F_DUMP), (family, transport), id, states, add) {
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                    return Err(transport.unsupported());
                }
                result => result?,
            }
        }
        Ok(found)
    }

    /// Terminates a socket: its program gets ECONNABORTED, or EDESTADDRREQ if it sends a datagram first; the peer of a TCP
    /// connection gets a reset. False if it is already closed.
    pub fn terminate(&self, socket: &ConnectedSocket) -> io::Result<bool> {
        self.destroy((socket.family, socket.transport), socket.id.clone())
    }

    /// Whether this kernel can list the sockets of a transport (`CONFIG_INET_UDP_DIAG`, `CONFIG_INET_TCP_DIAG`) and terminate
    /// them (`CONFIG_INET_DIAG_DESTROY`), and this process may.
    pub fn check_termination(&self, transport: Transport) -> io::Result<()> {
        self.connected(transport)?;
        // No socket has port 0 or this cookie.
        let id = SocketId { cookie: [0xfe; 8], ..unspecified(AF_INET) };
        self.destroy((AF_INET, transport), id).map(drop)
    }

    fn destroy(&self, kind: (u8, Transport), id: SocketId) -> io::Result<bool> {
        match self.ask((SOCK_DESTROY, NLM_F_ACK), kind, id, StateFlags::empty(), |_| ()) {
            Ok(()) => Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT | libc::ESTALE) => Ok(false),
                Some(libc::EOPNOTSUPP) => {
                    let text =
                        "this kernel cannot terminate sockets (it is built without CONFIG_INET_DIAG_DESTROY)";
                    Err(io::Error::new(io::ErrorKind::Unsupported, text))
                }
                _ => Err(error),
            },
        }
    }

    /// Sends a request about the sockets of a family and a transport, and passes each answer to `each`.
    fn ask(
        &self,
        command: (u16, u16),
        (family, transport): (u8, Transport),
        socket_id: SocketId,
        states: StateFlags,
        mut each: impl FnMut(InetResponse),
    ) -> io::Result<()> {
        let (protocol, extensions) = (transport.number(), ExtensionFlags::empty());
        let request = InetRequest { family, protocol, extensions, states, socket_id };
        let mut fixed = vec![0; request.buffer_len()];
        request.emit(&mut fixed);
        ask(&self.0, command, &fixed, &[], |payload| {
            each(InetResponse::parse(payload).map_err(io::Error::other)?);
            Ok(())
        })
    }
}

fn unspecified(family: u8) -> SocketId {
    if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, TcpStream},
        os::unix::net::UnixDatagram,
        slice,
    };

    use netlink_packet_core::{NLMSG_DONE, NLMSG_ERROR};

    use super::*;
    use crate::socket::append;

    /// One that is answered by these datagrams, and then by nothing; and the other end, where what is asked goes.
    fn answered(datagrams: &[Vec<u8>]) -> (SockDiag, UnixDatagram) {
        let (kernel, ours) = UnixDatagram::pair().unwrap();
        for it in datagrams {
            kernel.send(it).unwrap();
        }
        // Nothing more will come.
        ours.set_nonblocking(true).unwrap();
        (SockDiag(ours.into()), kernel)
    }

    fn raw(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        append(&mut bytes, (kind, 0, 0), body, &[]);
        bytes
    }

    fn done(code: i32) -> Vec<u8> {
        raw(NLMSG_DONE, &(-code).to_ne_bytes())
    }

    /// An error, with the header of what it is about; 0 is none.
    fn error(code: i32) -> Vec<u8> {
        raw(NLMSG_ERROR, &[&(-code).to_ne_bytes()[..], &raw(20, &[])].concat())
    }

    #[test]
    fn a_missing_module_is_not_confused_with_a_refusal() {
        for refusal in [done(libc::ENOENT), error(libc::ENOENT)] {
            for (transport, module) in [(Transport::Tcp, "tcp_diag"), (Transport::Udp, "udp_diag")] {
                let error = answered(slice::from_ref(&refusal)).0.connected(transport).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::Unsupported);
                assert!(error.to_string().contains(module), "{error}");
            }
        }
        for refusal in [done(libc::EPERM), error(libc::EPERM)] {
            let error = answered(&[refusal]).0.connected(Transport::Udp).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        }
        // IPv6 is listed as well, and its refusal counts, too.
        let error = answered(&[done(0), done(libc::EPERM)]).0.connected(Transport::Udp).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        assert!(answered(&[done(0), done(0)]).0.connected(Transport::Udp).unwrap().is_empty());
    }

    #[test]
    fn a_closed_socket_is_not_confused_with_one_that_cannot_be_terminated() {
        let socket = ConnectedSocket { family: AF_INET, transport: Transport::Udp, id: unspecified(AF_INET) };
        let end = |code| answered(&[error(code)]).0.terminate(&socket);
        assert!(end(0).unwrap());
        assert!(!end(libc::ENOENT).unwrap() && !end(libc::ESTALE).unwrap());
        let error = end(libc::EOPNOTSUPP).unwrap_err();
        assert!(error.to_string().contains("CONFIG_INET_DIAG_DESTROY"), "{error}");
        assert_eq!(end(libc::EPERM).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn a_truncated_or_malformed_answer_is_an_error() {
        // No final message.
        let error = answered(&[Vec::new()]).0.connected(Transport::Udp).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        // An answer of four bytes, and a header with a length beyond the datagram.
        let short = [raw(20, &[0; 4]), done(0)].concat();
        let mut lie = done(0);
        lie[0] = 255;
        for datagram in [short, lie] {
            assert!(answered(&[datagram]).0.connected(Transport::Udp).is_err());
        }
    }

    #[test]
    fn a_connection_is_listed_until_it_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stream = TcpStream::connect(address).unwrap();
        let is_listed = || match SockDiag::open().unwrap().connected(Transport::Tcp) {
            Ok(sockets) => Some(sockets.iter().any(|it| it.peer() == address)),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => None,
            Err(error) => panic!("{error}"),
        };
        let Some(while_open) = is_listed() else { return };
        assert!(while_open);
        drop((stream, listener));
        assert_eq!(is_listed(), Some(false));
    }

    #[test]
    fn the_real_kernel_answers() {
        let diag = SockDiag::open().unwrap();
        for error in
            [Transport::Tcp, Transport::Udp].into_iter().filter_map(|it| diag.check_termination(it).err())
        {
            // The kernel may lack support, or this process the permission.
            assert!(
                matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied),
                "{error}"
            );
        }
    }
}
