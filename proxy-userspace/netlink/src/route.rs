//! Requests to rtnetlink: links and queueing disciplines.

use std::{io, os::fd::AsRawFd as _};

use netlink_packet_core::{Emitable as _, NLM_F_ACK, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkHeader};
use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, SockFlag, SockProtocol, recv, send},
};

use crate::{
    attribute::Attribute,
    socket::{DATAGRAM_SIZE, error_code, messages, open},
};

/// The length of `struct nlmsghdr`, in bytes.
const HEADER: usize = 16;

/// Sends a request of a type; `fixed` is the structure before the attributes. Returns the messages of the answer, each with its
/// type.
fn request(kind: u16, flags: u16, fixed: &[u8], attributes: &[Attribute]) -> io::Result<Vec<(u16, Vec<u8>)>> {
    let begin = HEADER + fixed.len();
    let mut request = vec![0; begin + attributes.buffer_len()];
    let mut header = NetlinkHeader::default();
    header.length = u32::try_from(request.len()).unwrap_or(u32::MAX);
    header.message_type = kind;
    header.flags = NLM_F_REQUEST | flags;
    header.emit(&mut request);
    request[HEADER..begin].copy_from_slice(fixed);
    attributes.emit(&mut request[begin..]);
    let socket = open(SockProtocol::NetlinkRoute, 0, SockFlag::empty())?;
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    let mut answers = Vec::new();
    loop {
        let mut datagram = vec![0; DATAGRAM_SIZE];
        let length = recv(socket.as_raw_fd(), &mut datagram, MsgFlags::empty())?;
        for (header, payload) in messages(&datagram[..length]) {
            match header.message_type {
                NLMSG_DONE => return Ok(answers),
                NLMSG_ERROR => return error_code(payload).map_or(Ok(answers), |it| Err(it.into())),
                kind => answers.push((kind, payload.to_vec())),
            }
        }
    }
}

/// Deletes an interface; false if it does not exist.
///
/// # Errors
///
/// If the kernel refuses it.
pub fn delete_link(name: &str) -> io::Result<bool> {
    /// The length of `struct ifinfomsg` (linux/rtnetlink.h), in bytes.
    const INTERFACE: usize = 16;
    const DELETE_LINK: u16 = 17;
    const NAME: u16 = 3;
    match request(DELETE_LINK, NLM_F_ACK, &[0; INTERFACE], &[Attribute::text(NAME, name)]) {
        Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(false),
        result => result.map(|_| true),
    }
}

/// Deletes the queueing discipline `clsact` of an interface if it has no filters; false if it has.
///
/// # Errors
///
/// If it does not exist, or the kernel refuses it.
pub fn delete_empty_clsact(interface: u32) -> io::Result<bool> {
    const DELETE_QDISC: u16 = 37;
    const NEW_FILTER: u16 = 44;
    const GET_FILTER: u16 = 46;
    const DUMP: u16 = 0x300;
    /// `TC_H_CLSACT`, and its two parents of filters (linux/pkt_sched.h).
    const CLSACT: u32 = 0xffff_fff1;
    const PARENTS: [u32; 2] = [0xffff_fff2, 0xffff_fff3];
    /// `struct tcmsg` (linux/rtnetlink.h).
    let message = |handle: u32, parent: u32| [0, interface, handle, parent, 0].map(u32::to_ne_bytes).concat();
    for parent in PARENTS {
        if request(GET_FILTER, DUMP, &message(0, parent), &[])?.iter().any(|(kind, _)| *kind == NEW_FILTER) {
            return Ok(false);
        }
    }
    request(DELETE_QDISC, NLM_F_ACK, &message(0xffff_0000, CLSACT), &[]).map(|_| true)
}
