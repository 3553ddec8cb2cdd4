//! Netlink sockets and the framing of their messages.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use netlink_packet_core::{
    Emitable as _, ErrorBuffer, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader,
    Parseable as _,
};
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
        socket, sockopt,
    },
};

use crate::attribute::Attribute;

/// The length of `struct nlmsghdr` in bytes.
pub(crate) const HEADER: usize = 16;
/// More bytes than the kernel puts into one datagram.
pub(crate) const DATAGRAM_SIZE: usize = 64 << 10;

/// Opens a netlink socket in the calling thread's network namespace that receives these multicast groups, as a mask.
pub(crate) fn open(protocol: SockProtocol, groups: u32, flags: SockFlag) -> Result<OwnedFd, Errno> {
    let flags = flags | SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
    Ok(socket)
}

/// Sets the size of the receive buffer in bytes; without CAP_NET_ADMIN of the initial user namespace as far as
/// `net.core.rmem_max` allows.
pub(crate) fn set_receive_buffer(socket: &OwnedFd, size: usize) -> Result<(), Errno> {
    match setsockopt(socket, sockopt::RcvBufForce, &size) {
        Err(Errno::EPERM) => setsockopt(socket, sockopt::RcvBuf, &size),
        result => result,
    }
}

/// Sets the size of the send buffer in bytes; without CAP_NET_ADMIN of the initial user namespace as far as
/// `net.core.wmem_max` allows. A datagram that is larger is refused with `EMSGSIZE`.
pub(crate) fn set_send_buffer(socket: &OwnedFd, size: usize) -> Result<(), Errno> {
    match setsockopt(socket, sockopt::SndBufForce, &size) {
        Err(Errno::EPERM) => setsockopt(socket, sockopt::SndBuf, &size),
        result => result,
    }
}

/// Appends a request to a datagram: its type, its flags besides `NLM_F_REQUEST` and its number, what each request of this type
/// begins with, and attributes.
pub(crate) fn append(
    datagram: &mut Vec<u8>,
    (kind, flags, sequence): (u16, u16, u32),
    fixed: &[u8],
    attributes: &[Attribute],
) {
    let begin = datagram.len();
    datagram.resize(begin + HEADER, 0);
    datagram.extend_from_slice(fixed);
    attributes.iter().for_each(|it| it.append(datagram));
    let mut it = NetlinkHeader::default();
    it.length = u32::try_from(datagram.len() - begin).unwrap_or(u32::MAX);
    it.message_type = kind;
    it.flags = NLM_F_REQUEST | flags;
    it.sequence_number = sequence;
    it.emit(&mut datagram[begin..begin + HEADER]);
}

/// Sends a request: its type and its flags besides `NLM_F_REQUEST`, what each request of this type begins with, and attributes.
/// Passes each answer to `each`, until the kernel has acknowledged the request or has listed everything.
pub(crate) fn ask(
    socket: &OwnedFd,
    (kind, flags): (u16, u16),
    fixed: &[u8],
    attributes: &[Attribute],
    mut each: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut request = Vec::new();
    append(&mut request, (kind, flags, 0), fixed, attributes);
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    let mut datagram = vec![0; DATAGRAM_SIZE];
    loop {
        let length = recv(socket.as_raw_fd(), &mut datagram, MsgFlags::empty())?;
        for (header, payload) in messages(&datagram[..length]) {
            match header.message_type {
                // A kernel without tcp_diag or udp_diag reports that at the end of a list.
                NLMSG_DONE | NLMSG_ERROR => {
                    return error_code(payload).map_or(Ok(()), |errno| Err(errno.into()));
                }
                _ => each(payload)?,
            }
        }
    }
}

/// The messages of a datagram: header and payload.
pub(crate) fn messages(datagram: &[u8]) -> impl Iterator<Item = (NetlinkHeader, &[u8])> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let buffer = NetlinkBuffer::new_checked(rest).ok()?;
        let header = NetlinkHeader::parse(&buffer).ok()?;
        let payload = buffer.payload();
        rest = rest.get((header.length as usize).next_multiple_of(4)..).unwrap_or_default();
        Some((header, payload))
    })
}

/// The errno of an `NLMSG_ERROR` payload; `None` if it is an acknowledgment.
pub(crate) fn error_code(payload: &[u8]) -> Option<Errno> {
    let code = ErrorBuffer::new_checked(payload).ok()?.code()?;
    Some(Errno::from_raw(code.get().wrapping_neg()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_of_zero_ends_the_datagram() {
        assert_eq!(messages(&[0; 64]).count(), 0);
    }
}
