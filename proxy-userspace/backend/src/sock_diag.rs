//! The sockets of a network namespace, asked of the kernel over netlink (`NETLINK_SOCK_DIAG`), and ended through it.
//!
//! The one rule: a socket is ended by its cookie, so that none can be taken for another.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsRawFd as _, OwnedFd},
};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_sock_diag::{
    SOCK_DESTROY, SockDiagMessage,
    inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags},
};
use nix::{
    errno::Errno,
    libc,
    sys::{
        socket::{
            AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
            setsockopt, socket, sockopt::ReceiveTimeout,
        },
        time::{TimeVal, TimeValLike as _},
    },
};

/// A connected UDP socket.
#[derive(Clone, Debug)]
pub(crate) struct Connected {
    family: u8,
    id: SocketId,
}

impl Connected {
    /// Its cookie.
    pub(crate) fn cookie(&self) -> u64 {
        // Two words of the machine's own byte order, the lower half first.
        let [a, b, c, d, e, f, g, h] = self.id.cookie;
        u64::from(u32::from_ne_bytes([a, b, c, d])) | u64::from(u32::from_ne_bytes([e, f, g, h])) << 32
    }

    /// Whom the kernel sends its datagrams to, v4 ones without a v6 form.
    pub(crate) fn peer(&self) -> SocketAddr {
        SocketAddr::new(self.id.destination_address.to_canonical(), self.id.destination_port)
    }
}

/// A way to ask, in the network namespace that it was opened in.
#[derive(Debug)]
pub(crate) struct SockDiag(OwnedFd);

impl SockDiag {
    /// Opens one in the namespace of the calling thread.
    pub(crate) fn open() -> io::Result<Self> {
        let protocol = SockProtocol::NetlinkSockDiag;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(5))?;
        Ok(Self(socket))
    }

    /// Every connected UDP socket.
    pub(crate) fn connected_udp(&self) -> io::Result<Vec<Connected>> {
        let mut found = Vec::new();
        for family in [AF_INET, AF_INET6] {
            self.send(&message(family, unspecified(family), StateFlags::ESTABLISHED, NLM_F_DUMP))?;
            match self.receive(|it| found.push(Connected { family, id: it.header.socket_id })) {
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                    let text = "this kernel does not tell of UDP sockets (load the module udp_diag, or use a kernel with \
                                CONFIG_INET_UDP_DIAG)";
                    return Err(io::Error::new(io::ErrorKind::Unsupported, text));
                }
                result => result?,
            }
        }
        Ok(found)
    }

    /// Ends a socket: its program gets ECONNABORTED. False if it is gone already.
    pub(crate) fn end(&self, socket: &Connected) -> io::Result<bool> {
        self.destroy(socket.family, socket.id.clone())
    }

    /// Whether this kernel can tell of UDP sockets (`CONFIG_INET_UDP_DIAG`) and end sockets (`CONFIG_INET_DIAG_DESTROY`),
    /// and we may.
    pub(crate) fn can_end(&self) -> io::Result<()> {
        self.connected_udp()?;
        // Nobody has port 0 or this cookie.
        let id = SocketId { cookie: [0xfe; 8], ..unspecified(AF_INET) };
        self.destroy(AF_INET, id).map(drop)
    }

    fn destroy(&self, family: u8, id: SocketId) -> io::Result<bool> {
        let mut request = message(family, id, StateFlags::empty(), NLM_F_ACK);
        // The type of the message is the second field of its header.
        request[4..6].copy_from_slice(&SOCK_DESTROY.to_ne_bytes());
        self.send(&request)?;
        match self.receive(|_| ()) {
            Ok(()) => Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT | libc::ESTALE) => Ok(false),
                Some(libc::EOPNOTSUPP) => {
                    let text =
                        "this kernel cannot end sockets (it is built without CONFIG_INET_DIAG_DESTROY)";
                    Err(io::Error::new(io::ErrorKind::Unsupported, text))
                }
                _ => Err(error),
            },
        }
    }

    fn send(&self, request: &[u8]) -> io::Result<()> {
        send(self.0.as_raw_fd(), request, MsgFlags::empty())?;
        Ok(())
    }

    /// Receives answers to the end.
    fn receive(&self, mut answer: impl FnMut(InetResponse)) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut rest = &buffer[..length];
            while !rest.is_empty() {
                let message =
                    NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(io::Error::other)?;
                match message.payload {
                    // Where the kernel has no such sockets to tell of, it says so here.
                    NetlinkPayload::Done(it) if it.code < 0 => {
                        return Err(io::Error::from_raw_os_error(-it.code));
                    }
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(it) => {
                        return it.code.map_or(Ok(()), |it| Err(Errno::from_raw(-it.get()).into()));
                    }
                    NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(it)) => answer(*it),
                    _ => {}
                }
                // Messages are padded to words.
                let next = (message.header.length as usize).next_multiple_of(4).max(4);
                rest = rest.get(next..).unwrap_or_default();
            }
        }
    }
}

const AF_INET: u8 = libc::AF_INET as u8;
const AF_INET6: u8 = libc::AF_INET6 as u8;

fn unspecified(family: u8) -> SocketId {
    if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() }
}

/// A request about UDP sockets.
fn message(family: u8, socket_id: SocketId, states: StateFlags, flags: u16) -> Vec<u8> {
    let request = InetRequest {
        family,
        protocol: libc::IPPROTO_UDP as u8,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    };
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}
