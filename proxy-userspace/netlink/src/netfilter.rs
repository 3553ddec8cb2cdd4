//! Messages of netfilter (nf_tables, conntrack) over netlink.
//!
//! Invariant: a request is complete when `send` returns, and its answers are in the socket by then.

use std::{
    io::{self, IoSlice},
    os::fd::{AsRawFd as _, OwnedFd},
};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR};
use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, NetlinkAddr, SockFlag, SockProtocol, getsockname, recv, send, sendmsg},
};

use crate::{
    attribute::{self, Attribute},
    socket::{self, DATAGRAM_SIZE, HEADER, error_code, messages, open},
    uapi::{NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END, NFNL_SUBSYS_NFTABLES},
};

/// The length of `struct nfgenmsg` in bytes, with which every message of netfilter begins.
pub(crate) const NFGENMSG: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Subsystem and command.
    pub kind: u16,
    /// Flags besides `NLM_F_REQUEST`.
    pub flags: u16,
    /// `NFPROTO_…`.
    pub family: u8,
    pub attributes: Vec<Attribute>,
}

impl Message {
    /// A message to nf_tables: its command is `NFT_MSG_…`, its family `NFPROTO_…`.
    pub fn nf_tables(command: u16, family: u8, attributes: impl Into<Vec<Attribute>>) -> Self {
        Self { kind: NFNL_SUBSYS_NFTABLES << 8 | command, flags: 0, family, attributes: attributes.into() }
    }

    /// The message that begins or ends a transaction.
    fn delimiter(kind: u16) -> Self {
        Self { kind, flags: 0, family: 0, attributes: Vec::new() }
    }

    fn emit(&self, buffer: &mut Vec<u8>, sequence: u32, resource: u16) {
        let [high, low] = resource.to_be_bytes();
        let begin: [u8; NFGENMSG] = [self.family, 0, high, low];
        socket::append(buffer, (self.kind, self.flags, sequence), &begin, &self.attributes);
    }
}

/// From how many bytes on a part of a batch gets no further message; the kernel takes 1,024 parts.
const PART: usize = 1 << 20;

/// Messages that are sent together, each encoded as it is added.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The datagram, without sequence numbers, in parts: one buffer would be copied as it grows, and there can be 100 MB. No
    /// message is divided.
    parts: Vec<Vec<u8>>,
    len: usize,
    resource: u16,
}

impl Batch {
    /// A transaction of nf_tables, with the message that begins it; see [`Netfilter::transact`].
    pub fn transaction() -> Self {
        let mut batch = Self { resource: NFNL_SUBSYS_NFTABLES, ..Self::default() };
        batch.push(&Message::delimiter(NFNL_MSG_BATCH_BEGIN));
        batch
    }

    pub fn push(&mut self, message: &Message) {
        if self.parts.last().is_none_or(|it| it.len() >= PART) {
            // Most messages have less than 64 KiB.
            self.parts.push(Vec::with_capacity(if self.parts.is_empty() { 0 } else { PART + PART / 8 }));
        }
        if let Some(part) = self.parts.last_mut() {
            message.emit(part, 0, self.resource);
        }
        self.len += 1;
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Their size in bytes.
    pub fn size(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// One of the messages, whose attributes are not divided further.
    pub fn message(&self, index: usize) -> Option<Message> {
        let (header, payload) = self.parts.iter().flat_map(|it| messages(it)).nth(index)?;
        let attributes =
            attribute::each(payload.get(NFGENMSG..)?).map(|(kind, it)| Attribute::bytes(kind, it));
        let attributes = attributes.collect();
        let flags = header.flags & !NLM_F_REQUEST;
        Some(Message { kind: header.message_type, flags, family: *payload.first()?, attributes })
    }

    fn number(&mut self, first: u32) {
        let mut sequence = first;
        for part in &mut self.parts {
            let mut rest = &mut part[..];
            while let Some((header, payload)) = rest.split_first_chunk_mut::<HEADER>() {
                header[8..12].copy_from_slice(&sequence.to_ne_bytes());
                let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
                // The header is a part of it.
                let after = (length as usize).next_multiple_of(4).saturating_sub(HEADER);
                rest = payload.get_mut(after..).unwrap_or_default();
                sequence = sequence.wrapping_add(1);
            }
        }
    }
}

impl Extend<Message> for Batch {
    fn extend<T: IntoIterator<Item = Message>>(&mut self, all: T) {
        all.into_iter().for_each(|it| self.push(&it));
    }
}

/// A message that the kernel refused.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// The index of the message; `None` if the kernel refused the batch as a whole.
    pub message: Option<usize>,
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
        let mut batch = Batch::default();
        messages.iter().for_each(|it| batch.push(it));
        self.send(&mut batch)
    }

    /// Ends a [transaction](Batch::transaction) and sends it: its messages take effect together or not at all.
    ///
    /// Returns the batch, and the messages that were refused; if there are any, nothing has taken effect.
    pub fn transact(&mut self, mut batch: Batch) -> Result<(Batch, Vec<Refused>), Errno> {
        batch.push(&Message::delimiter(NFNL_MSG_BATCH_END));
        let refused = self.send(&mut batch)?;
        Ok((batch, refused))
    }

    fn send(&mut self, batch: &mut Batch) -> Result<Vec<Refused>, Errno> {
        let first = self.sequence.wrapping_add(1);
        batch.number(first);
        self.sequence = self.sequence.wrapping_add(batch.len as u32);
        // The whole batch is one datagram, however long. The kernel adds its own overhead to the length.
        let parts: Vec<_> = batch.parts.iter().map(|it| IoSlice::new(it)).collect();
        socket::set_send_buffer(&self.socket, parts.iter().map(|it| it.len()).sum::<usize>() + (1 << 20))?;
        sendmsg::<()>(self.socket.as_raw_fd(), &parts, &[], MsgFlags::empty(), None)?;
        let mut refused = Vec::new();
        loop {
            let length = match self.receive(MsgFlags::MSG_DONTWAIT) {
                Ok(length) => length,
                Err(Errno::EAGAIN) => return Ok(refused),
                Err(errno) => return Err(errno),
            };
            for (header, payload) in messages(&self.datagram[..length]) {
                if header.message_type == NLMSG_ERROR
                    && let Some(errno) = error_code(payload)
                {
                    let index = header.sequence_number.wrapping_sub(first) as usize;
                    refused.push(Refused { message: (index < batch.len).then_some(index), errno });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_batch_is_in_parts_of_whole_messages_which_are_numbered_and_found() {
        let message = |n: u16| Message {
            kind: n,
            flags: 0,
            family: 2,
            attributes: vec![Attribute::bytes(1, vec![n as u8; 50_000 + usize::from(n)])],
        };
        let mut batch = Batch::default();
        batch.extend((0..100).map(message));
        assert_eq!((batch.len(), batch.parts.len()), (100, 5));
        batch.number(7);
        let headers: Vec<_> =
            batch.parts.iter().flat_map(|it| messages(it)).map(|(header, _)| header).collect();
        assert!(headers.iter().map(|it| it.sequence_number).eq(7..107));
        assert!(headers.iter().map(|it| it.message_type).eq(0..100));
        assert_eq!(batch.message(42), Some(message(42)));
        assert_eq!(batch.message(100), None);
    }
}
