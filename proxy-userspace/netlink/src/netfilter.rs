//! Messages of netfilter (nf_tables, conntrack) over netlink.
//!
//! Invariant: a request is complete when `send` returns, and its answers are in the socket by then.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use netlink_packet_core::{
    Emitable as _, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkHeader,
};
use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, NetlinkAddr, SockFlag, SockProtocol, getsockname, recv, send},
};

use crate::{
    attribute::Attribute,
    socket::{self, DATAGRAM_SIZE, error_code, messages, open},
};

/// The length of `struct nlmsghdr` in bytes.
const HEADER: usize = 16;
/// The length of `struct nfgenmsg` in bytes, with which every message of netfilter begins.
pub const NFGENMSG: usize = 4;

/// A message of netfilter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Subsystem and command.
    pub kind: u16,
    /// Flags besides `NLM_F_REQUEST`.
    pub flags: u16,
    /// `NFPROTO_…`.
    pub family: u8,
    /// Its attributes.
    pub attributes: Vec<Attribute>,
}

impl Message {
    /// Appends the message to a batch.
    fn emit(&self, buffer: &mut Vec<u8>, sequence: u32, resource: u16) {
        let attributes = self.attributes.as_slice();
        let begin = buffer.len();
        let length = HEADER + NFGENMSG + attributes.buffer_len();
        buffer.resize(begin + length, 0);
        let (header, rest) = buffer[begin..].split_at_mut(HEADER);
        let mut it = NetlinkHeader::default();
        it.length = u32::try_from(length).unwrap_or(u32::MAX);
        it.message_type = self.kind;
        it.flags = NLM_F_REQUEST | self.flags;
        it.sequence_number = sequence;
        it.emit(header);
        rest[0] = self.family;
        rest[2..4].copy_from_slice(&resource.to_be_bytes());
        attributes.emit(&mut rest[NFGENMSG..]);
    }
}

/// A message that the kernel refused.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// The index of the message; `None` if the kernel refused the batch as a whole.
    pub message: Option<usize>,
    /// The errno.
    pub errno: Errno,
}

/// A socket to netfilter, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Netfilter {
    socket: OwnedFd,
    port: u32,
    sequence: u32,
    datagram: Vec<u8>,
}

impl Netfilter {
    /// Opens a socket.
    pub fn open() -> io::Result<Self> {
        let socket = open(SockProtocol::NetlinkNetFilter, 0, SockFlag::empty())?;
        let port = getsockname::<NetlinkAddr>(socket.as_raw_fd())?.pid();
        Ok(Self { socket, port, sequence: 0, datagram: vec![0; DATAGRAM_SIZE] })
    }

    /// The port id of this socket, which notifications of its own changes carry.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Lists all objects of a kind, and passes the attributes of each to `each`.
    ///
    /// # Errors
    ///
    /// `EINTR` if the objects changed meanwhile: some may be missing.
    pub fn dump(&mut self, message: &Message, mut each: impl FnMut(&[u8])) -> Result<(), Errno> {
        let mut request = Vec::new();
        self.sequence = self.sequence.wrapping_add(1);
        let message = Message { flags: message.flags | NLM_F_DUMP, ..message.clone() };
        message.emit(&mut request, self.sequence, 0);
        send(self.socket.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut is_whole = true;
        loop {
            let length = self.receive(MsgFlags::empty())?;
            for (header, payload) in messages(&self.datagram[..length]) {
                if header.sequence_number != self.sequence {
                    continue;
                }
                is_whole &= header.flags & NLM_F_DUMP_INTR == 0;
                match header.message_type {
                    NLMSG_DONE => return if is_whole { Ok(()) } else { Err(Errno::EINTR) },
                    NLMSG_ERROR => return error_code(payload).map_or(Ok(()), Err),
                    _ => each(payload.get(NFGENMSG..).unwrap_or_default()),
                }
            }
        }
    }

    /// Sends messages that succeed or fail one by one; returns those that were refused.
    pub fn each(&mut self, messages: &[Message]) -> Result<Vec<Refused>, Errno> {
        self.send_batch(messages, 0)
    }

    /// Sends messages that take effect together or not at all. The first and the last delimit the batch and name its
    /// subsystem.
    ///
    /// Returns the messages that were refused; if there are any, nothing has taken effect.
    pub fn transact(&mut self, messages: &[Message], subsystem: u16) -> Result<Vec<Refused>, Errno> {
        self.send_batch(messages, subsystem)
    }

    fn send_batch(&mut self, messages: &[Message], resource: u16) -> Result<Vec<Refused>, Errno> {
        let first = self.sequence.wrapping_add(1);
        let mut request = Vec::new();
        for message in messages {
            self.sequence = self.sequence.wrapping_add(1);
            message.emit(&mut request, self.sequence, resource);
        }
        // The whole batch is one datagram, however long. The kernel adds its own overhead to the length.
        socket::set_send_buffer(&self.socket, request.len() + (1 << 20))?;
        send(self.socket.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut refused = Vec::new();
        loop {
            let length = match self.receive(MsgFlags::MSG_DONTWAIT) {
                Ok(length) => length,
                Err(Errno::EAGAIN) => return Ok(refused),
                Err(errno) => return Err(errno),
            };
            for (header, payload) in socket::messages(&self.datagram[..length]) {
                if header.message_type == NLMSG_ERROR
                    && let Some(errno) = error_code(payload)
                {
                    let index = header.sequence_number.wrapping_sub(first) as usize;
                    refused.push(Refused { message: (index < messages.len()).then_some(index), errno });
                }
            }
        }
    }

    fn receive(&mut self, flags: MsgFlags) -> Result<usize, Errno> {
        loop {
            match recv(self.socket.as_raw_fd(), &mut self.datagram, flags) {
                Err(Errno::EINTR) => {}
                result => return result,
            }
        }
    }
}
