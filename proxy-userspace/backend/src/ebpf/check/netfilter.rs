//! Which chains nf_tables has, in this network namespace: asked over netlink, so that no tool must be there.
//!
//! The one rule: only names are read, and an answer of any shape is survived.

use std::{io, os::fd::AsRawFd as _};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
        socket, sockopt::ReceiveTimeout,
    },
    sys::time::{TimeVal, TimeValLike as _},
};

/// A chain of nf_tables, of any family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) table: String,
    pub(super) chain: String,
}

/// `nlmsghdr` and `nfgenmsg`, in bytes.
const HEADER: usize = 16;
const GENERIC: usize = 4;
/// Message types (`linux/netlink.h`; `linux/netfilter/nf_tables.h`, subsystem 10).
const ERROR: u16 = 2;
const DONE: u16 = 3;
const GET_CHAIN: u16 = 10 << 8 | 4;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const DUMP: u16 = 0x301;
/// Attributes of a chain.
const TABLE: u16 = 1;
const NAME: u16 = 3;

/// Every chain that there is; none where the kernel has no nf_tables.
pub(super) fn chains() -> io::Result<Vec<Chain>> {
    let socket = match socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    ) {
        Err(Errno::EPROTONOSUPPORT) => return Ok(Vec::new()),
        socket => socket?,
    };
    let fd = socket.as_raw_fd();
    bind(fd, &NetlinkAddr::new(0, 0))?;
    setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(5))?;
    let mut request = Vec::new();
    request.extend(((HEADER + GENERIC) as u32).to_ne_bytes());
    request.extend(GET_CHAIN.to_ne_bytes());
    request.extend(DUMP.to_ne_bytes());
    // Sequence and port; then the generic part: every family, version 0.
    request.extend([0; 8 + GENERIC]);
    send(fd, &request, MsgFlags::empty())?;
    let mut chains = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = recv(fd, &mut buffer, MsgFlags::empty())?;
        if read(&buffer[..length], &mut chains)? {
            return Ok(chains);
        }
    }
}

/// Reads some messages; true if they were the last.
fn read(mut messages: &[u8], chains: &mut Vec<Chain>) -> io::Result<bool> {
    while let Some((header, _)) = messages.split_first_chunk::<HEADER>() {
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let Some(message) = messages.get(HEADER..length) else { break };
        match u16::from_ne_bytes([header[4], header[5]]) {
            DONE => return Ok(true),
            ERROR => {
                let code = message.first_chunk().map_or(0, |it| i32::from_ne_bytes(*it));
                return match Errno::from_raw(-code) {
                    // There is no nf_tables.
                    Errno::EINVAL | Errno::EOPNOTSUPP => Ok(true),
                    _ if code == 0 => Ok(true),
                    errno => Err(errno.into()),
                };
            }
            _ => chains.extend(message.get(GENERIC..).and_then(chain)),
        }
        messages = messages.get(aligned(length)..).unwrap_or_default();
    }
    Ok(false)
}

fn chain(mut attributes: &[u8]) -> Option<Chain> {
    let (mut table, mut name) = (None, None);
    while let Some(([a, b, c, d], _)) = attributes.split_first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([*a, *b]));
        let value = attributes.get(4..length)?;
        let text = || Some(std::str::from_utf8(value).ok()?.trim_end_matches('\0').to_owned());
        match u16::from_ne_bytes([*c, *d]) {
            TABLE => table = text(),
            NAME => name = text(),
            _ => {}
        }
        attributes = attributes.get(aligned(length)..).unwrap_or_default();
    }
    Some(Chain { table: table?, chain: name? })
}

/// Messages and attributes begin at multiples of four.
fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_answer_of_any_shape_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
            let mut chains = Vec::new();
            let _ = read(&bytes, &mut chains);
            let _ = chain(&bytes);
        }
    }

    #[test]
    fn a_length_of_nothing_does_not_loop() {
        assert!(matches!(read(&[0; 64], &mut Vec::new()), Ok(false)));
    }
}
