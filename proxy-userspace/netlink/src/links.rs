//! The network interfaces of this network namespace.

use std::{io, os::fd::AsRawFd as _};

use netlink_packet_core::{Emitable as _, NLM_F_ACK, NLM_F_REQUEST, NLMSG_ERROR, NetlinkHeader};
use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, SockFlag, SockProtocol, recv, send},
};

use crate::{
    attribute::Attribute,
    socket::{DATAGRAM_SIZE, error_code, messages, open},
};

/// Deletes an interface; false if it does not exist.
///
/// # Errors
///
/// If the kernel refuses it.
pub fn delete(name: &str) -> io::Result<bool> {
    /// The length of `struct nlmsghdr` and of `struct ifinfomsg` (linux/rtnetlink.h), in bytes.
    const HEADER: usize = 16;
    const INTERFACE: usize = 16;
    const DELETE_LINK: u16 = 17;
    const NAME: u16 = 3;
    let attributes = [Attribute::text(NAME, name)];
    let mut request = vec![0; HEADER + INTERFACE + attributes.as_slice().buffer_len()];
    let mut header = NetlinkHeader::default();
    header.length = u32::try_from(request.len()).unwrap_or(u32::MAX);
    header.message_type = DELETE_LINK;
    header.flags = NLM_F_REQUEST | NLM_F_ACK;
    header.emit(&mut request);
    attributes.as_slice().emit(&mut request[HEADER + INTERFACE..]);
    let socket = open(SockProtocol::NetlinkRoute, 0, SockFlag::empty())?;
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    let mut datagram = vec![0; DATAGRAM_SIZE];
    let length = recv(socket.as_raw_fd(), &mut datagram, MsgFlags::empty())?;
    let answer = messages(&datagram[..length]).find(|(header, _)| header.message_type == NLMSG_ERROR);
    match answer.and_then(|(_, payload)| error_code(payload)) {
        None => Ok(true),
        Some(Errno::ENODEV) => Ok(false),
        Some(errno) => Err(errno.into()),
    }
}
