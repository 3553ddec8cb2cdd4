//! Netlink sockets: requests, dumps, transactions, and news.
//!
//! The one rule: nothing is waited for but what the kernel is bound to answer.
//! A request is done when `send` returns, and its answers are there by then.

mod attribute;
mod news;

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use netlink_packet_core::{
    Emitable as _, ErrorBuffer, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR,
    NetlinkBuffer, NetlinkHeader,
};
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, getsockname, recv,
        send, setsockopt, socket, sockopt,
    },
};

pub(crate) use attribute::{Attribute, each, find, text, u32};
pub(crate) use news::{Heard, News};

/// The length of `struct nlmsghdr`.
const HEADER: usize = 16;
/// The length of `struct nfgenmsg`, with which every message of netfilter begins.
pub(crate) const NFGENMSG: usize = 4;
/// More than the kernel puts into one datagram.
const DATAGRAM: usize = 64 << 10;

/// A message of netfilter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    /// Subsystem and command.
    pub(crate) kind: u16,
    /// Flags besides `NLM_F_REQUEST`.
    pub(crate) flags: u16,
    /// `NFPROTO_…`.
    pub(crate) family: u8,
    /// What it is about.
    pub(crate) attributes: Vec<Attribute>,
}

impl Message {
    /// Appends the message to others.
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

/// What the kernel refused of a transaction, and why.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    /// The position of the message; none if it is all of it.
    pub(crate) message: Option<usize>,
    /// The errno.
    pub(crate) errno: Errno,
}

/// A socket to netfilter, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Netfilter {
    socket: OwnedFd,
    port: u32,
    sequence: u32,
    datagram: Vec<u8>,
}

impl Netfilter {
    /// Opens a socket.
    pub(crate) fn open() -> io::Result<Self> {
        let socket = open(SockProtocol::NetlinkNetFilter, 0)?;
        let port = getsockname::<NetlinkAddr>(socket.as_raw_fd())?.pid();
        Ok(Self { socket, port, sequence: 0, datagram: vec![0; DATAGRAM] })
    }

    /// The address that the kernel gave to this socket; news of what it does bear it.
    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// Asks for everything of a kind and hands over each answer, from its attributes on.
    ///
    /// # Errors
    ///
    /// `EINTR` if what is asked for changed meanwhile: some of it may be missing.
    pub(crate) fn dump(&mut self, message: &Message, mut each: impl FnMut(&[u8])) -> Result<(), Errno> {
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
                    NLMSG_ERROR => return code(payload).map_or(Ok(()), Err),
                    _ => each(payload.get(NFGENMSG..).unwrap_or_default()),
                }
            }
        }
    }

    /// Sends messages, each of which is done or refused by itself.
    ///
    /// Returns what was refused.
    pub(crate) fn each(&mut self, messages: &[Message]) -> Result<Vec<Refused>, Errno> {
        self.talk(messages, 0)
    }

    /// Sends messages that take effect together, or not at all. The first and the last of them frame the transaction and
    /// name its subsystem.
    ///
    /// Returns what was refused; if anything was, nothing has taken effect.
    pub(crate) fn transact(&mut self, messages: &[Message], subsystem: u16) -> Result<Vec<Refused>, Errno> {
        self.talk(messages, subsystem)
    }

    fn talk(&mut self, messages: &[Message], resource: u16) -> Result<Vec<Refused>, Errno> {
        let first = self.sequence.wrapping_add(1);
        let mut request = Vec::new();
        for message in messages {
            self.sequence = self.sequence.wrapping_add(1);
            message.emit(&mut request, self.sequence, resource);
        }
        // All of it goes in one datagram, however long. The kernel counts its own overhead, too.
        setsockopt(&self.socket, sockopt::SndBufForce, &(request.len() + (1 << 20)))?;
        send(self.socket.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut refused = Vec::new();
        loop {
            let length = match self.receive(MsgFlags::MSG_DONTWAIT) {
                Ok(length) => length,
                Err(Errno::EAGAIN) => return Ok(refused),
                Err(errno) => return Err(errno),
            };
            for (header, payload) in self::messages(&self.datagram[..length]) {
                if header.message_type == NLMSG_ERROR
                    && let Some(errno) = code(payload)
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

/// Opens a netlink socket that hears of these groups, as a mask.
fn open(protocol: SockProtocol, groups: u32) -> Result<OwnedFd, Errno> {
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
    Ok(socket)
}

/// The messages of a datagram: header and what follows it.
fn messages(datagram: &[u8]) -> impl Iterator<Item = (NetlinkHeader, &[u8])> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let buffer = NetlinkBuffer::new_checked(rest).ok()?;
        let mut header = NetlinkHeader::default();
        header.length = buffer.length();
        header.message_type = buffer.message_type();
        header.flags = buffer.flags();
        header.sequence_number = buffer.sequence_number();
        header.port_number = buffer.port_number();
        let payload = buffer.payload();
        rest = rest.get((header.length as usize).next_multiple_of(4)..).unwrap_or_default();
        Some((header, payload))
    })
}

/// The errno of an answer; none if it says that all is well.
fn code(payload: &[u8]) -> Option<Errno> {
    let code = ErrorBuffer::new_checked(payload).ok()?.code()?;
    Some(Errno::from_raw(code.get().wrapping_neg()))
}
