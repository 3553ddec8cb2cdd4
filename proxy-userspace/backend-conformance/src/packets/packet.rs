//! Packets as the probe sends and sees them: the first ones of connections, and refusals.
//!
//! Invariant: pure. What is built has valid checksums, since netfilter does not answer other packets.

use std::net::{IpAddr, SocketAddr};

use model::Protocol;

/// Numbers of IP protocols.
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// The sequence number of what the probe sends.
const SEQUENCE: u32 = 1_000;

/// A packet, as far as the probe looks at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
    pub(super) kind: Kind,
}

impl Packet {
    /// Whether both have the same source and destination.
    pub(super) fn is_of(&self, other: &Self) -> bool {
        (self.source, self.destination) == (other.source, other.destination)
    }
}

/// The role of a packet in a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The first packet of a connection or flow. A TCP packet has this sequence number.
    First { protocol: Protocol, sequence: u32 },
    /// The second one of TCP.
    Accepted { sequence: u32, acknowledged: u32 },
    /// The third one of TCP, or a later one that only acknowledges.
    Acknowledged,
    /// The one with which a side of TCP ends a connection.
    Ended { acknowledged: u32 },
    /// A reset; or an ICMP message, about a packet with this source and destination.
    Refused,
}

/// The first packet of a connection.
pub(super) fn first(protocol: Protocol, source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let ports = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
    match protocol {
        Protocol::Tcp => tcp(source, destination, SYN, SEQUENCE, 0),
        Protocol::Udp => {
            let datagram = [&ports, &[0, 9, 0, 0, b'?'][..]].concat();
            checked(source.ip(), destination.ip(), UDP, datagram, 6)
        }
        Protocol::Sctp => {
            // An INIT chunk (RFC 9260, 3.3.2): its tag, window, streams and sequence number.
            let chunk = [1, 0, 0, 20, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1];
            let mut packet = [&ports, &[0; 8][..], &chunk].concat();
            let checksum = crc32c(&packet).to_le_bytes();
            packet[8..12].copy_from_slice(&checksum);
            ip(source.ip(), destination.ip(), SCTP, packet)
        }
    }
}

/// The reply of the other side of a connection; `None` if it sends nothing.
pub(super) fn reply(packet: &Packet, bytes: &[u8]) -> Option<Vec<u8>> {
    let Packet { source, destination, kind } = *packet;
    match kind {
        Kind::First { protocol: Protocol::Tcp, sequence } => {
            Some(tcp(destination, source, SYN | ACK, SEQUENCE, sequence.wrapping_add(1)))
        }
        Kind::First { protocol: Protocol::Udp, .. } => {
            Some(unreachable(destination.ip(), source.ip(), bytes))
        }
        Kind::First { protocol: Protocol::Sctp, .. } | Kind::Acknowledged | Kind::Refused => None,
        Kind::Accepted { sequence, acknowledged } => {
            Some(tcp(destination, source, ACK, acknowledged, sequence.wrapping_add(1)))
        }
        Kind::Ended { acknowledged } => Some(tcp(destination, source, RST, acknowledged, 0)),
    }
}

/// The reset of a connection that the probe began, once it is established.
pub(super) fn reset(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    tcp(source, destination, RST, SEQUENCE + 1, 0)
}

fn tcp(source: SocketAddr, destination: SocketAddr, flags: u8, sequence: u32, acknowledged: u32) -> Vec<u8> {
    let ports = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
    let numbers = [sequence.to_be_bytes(), acknowledged.to_be_bytes()].concat();
    // A header of five words, a window of 65535, no checksum yet, and nothing urgent.
    let segment = [&ports[..], &numbers, &[5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]].concat();
    checked(source.ip(), destination.ip(), TCP, segment, 16)
}

/// ICMP: the port of this packet is unreachable.
fn unreachable(source: IpAddr, destination: IpAddr, packet: &[u8]) -> Vec<u8> {
    let (protocol, kind) = if source.is_ipv4() { (ICMP, [3, 3]) } else { (ICMPV6, [1, 4]) };
    let message = [&kind[..], &[0; 6], packet].concat();
    checked(source, destination, protocol, message, 2)
}

fn ip(source: IpAddr, destination: IpAddr, protocol: u8, payload: Vec<u8>) -> Vec<u8> {
    let length = u16::try_from(payload.len()).expect("it is short");
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let total = (length + 20).to_be_bytes();
            let mut header = vec![0x45, 0, total[0], total[1], 0, 1, 0, 0, 64, protocol, 0, 0];
            header.extend(source.octets().into_iter().chain(destination.octets()));
            let checksum = checksum([&header]).to_be_bytes();
            header[10..12].copy_from_slice(&checksum);
            [header, payload].concat()
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let length = length.to_be_bytes();
            let header = [0x60, 0, 0, 0, length[0], length[1], protocol, 64];
            [&header[..], &source.octets(), &destination.octets(), &payload].concat()
        }
        _ => unreachable!("a connection has one family"),
    }
}

/// A packet with the checksum of the Internet in its payload, which for all but ICMP covers the addresses.
fn checked(source: IpAddr, destination: IpAddr, protocol: u8, mut payload: Vec<u8>, at: usize) -> Vec<u8> {
    let octets = |it| match it {
        IpAddr::V4(it) => it.octets().to_vec(),
        IpAddr::V6(it) => it.octets().to_vec(),
    };
    let length = u16::try_from(payload.len()).expect("it is short").to_be_bytes();
    let mut addresses =
        [octets(source), octets(destination), vec![0, protocol, length[0], length[1]]].concat();
    if protocol == ICMP {
        addresses.clear();
    }
    let sum = match checksum([&addresses, &payload]) {
        // Zero means that there is none.
        0 if protocol == UDP => u16::MAX,
        sum => sum,
    };
    payload[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    ip(source, destination, protocol, payload)
}

/// The checksum of the Internet (RFC 1071); all parts but the last have an even length.
fn checksum<'a>(parts: impl IntoIterator<Item = &'a Vec<u8>>) -> u16 {
    let words = parts.into_iter().flat_map(|it| it.chunks(2));
    let mut sum: u32 = words.map(|it| u32::from(it[0]) << 8 | it.get(1).map_or(0, |it| u32::from(*it))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("it was folded")
}

/// The checksum of SCTP (RFC 9260, appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, it| (0..8).fold(crc ^ u32::from(*it), step))
}

/// Parses a packet; `None` if it is irrelevant to the probe.
pub(super) fn parse(bytes: &[u8]) -> Option<Packet> {
    let (source, destination, protocol, payload) = addresses(bytes)?;
    let packet = |kind| between(source, destination, payload, kind);
    match protocol {
        TCP => {
            let (sequence, acknowledged) = (be32(payload, 4)?, be32(payload, 8)?);
            let flags = *payload.get(13)? & (FIN | SYN | RST | ACK);
            packet(match flags {
                _ if flags & RST != 0 => Kind::Refused,
                SYN => Kind::First { protocol: Protocol::Tcp, sequence },
                _ if flags == SYN | ACK => Kind::Accepted { sequence, acknowledged },
                _ if flags & FIN != 0 => Kind::Ended { acknowledged },
                ACK => Kind::Acknowledged,
                _ => return None,
            })
        }
        UDP => packet(Kind::First { protocol: Protocol::Udp, sequence: 0 }),
        // The INIT chunk.
        SCTP if payload.get(12) == Some(&1) => packet(Kind::First { protocol: Protocol::Sctp, sequence: 0 }),
        ICMP if payload.first() == Some(&3) => refused(payload),
        ICMPV6 if payload.first() == Some(&1) => refused(payload),
        _ => None,
    }
}

/// What a message says is unreachable.
fn refused(message: &[u8]) -> Option<Packet> {
    let (source, destination, _, payload) = addresses(message.get(8..)?)?;
    between(source, destination, payload, Kind::Refused)
}

/// A packet between these addresses, whose ports are at the beginning of its payload.
fn between(source: IpAddr, destination: IpAddr, payload: &[u8], kind: Kind) -> Option<Packet> {
    let (from, to) = (be16(payload, 0)?, be16(payload, 2)?);
    Some(Packet { source: (source, from).into(), destination: (destination, to).into(), kind })
}

/// Source, destination, protocol and payload.
fn addresses(bytes: &[u8]) -> Option<(IpAddr, IpAddr, u8, &[u8])> {
    let array = |at| bytes.get(at..)?.first_chunk::<16>().copied();
    match bytes.first()? >> 4 {
        4 => {
            let header = usize::from(bytes[0] & 15) * 4;
            let ip = |at| Some(IpAddr::from(*bytes.get(at..)?.first_chunk::<4>()?));
            Some((ip(12)?, ip(16)?, *bytes.get(9)?, bytes.get(header..)?))
        }
        6 => Some((array(8)?.into(), array(24)?.into(), *bytes.get(6)?, bytes.get(40..)?)),
        _ => None,
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|it| u16::from_be_bytes(*it))
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|it| u32::from_be_bytes(*it))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_is_parsed() {
        for (source, destination) in
            [("10.0.0.1:1000", "10.0.0.2:80"), ("[fd00::1]:1000", "[2001:db8::2]:80")]
                .map(|(a, b)| (a.parse::<SocketAddr>().unwrap(), b.parse::<SocketAddr>().unwrap()))
        {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
                let bytes = first(protocol, source, destination);
                let sequence = if protocol == Protocol::Tcp { SEQUENCE } else { 0 };
                let packet = Packet { source, destination, kind: Kind::First { protocol, sequence } };
                assert_eq!(parse(&bytes), Some(packet));
                let expected = match protocol {
                    Protocol::Tcp => Some(Packet {
                        source: destination,
                        destination: source,
                        kind: Kind::Accepted { sequence: SEQUENCE, acknowledged: SEQUENCE + 1 },
                    }),
                    // It is about the datagram.
                    Protocol::Udp => Some(Packet { kind: Kind::Refused, ..packet }),
                    Protocol::Sctp => None,
                };
                let answer = reply(&packet, &bytes).and_then(|it| parse(&it));
                assert_eq!(answer, expected);
                if let Some(it) = answer.filter(|_| protocol == Protocol::Tcp) {
                    let third = reply(&it, &[]).and_then(|it| parse(&it)).unwrap();
                    assert!(third.kind == Kind::Acknowledged && third.is_of(&packet));
                    assert_eq!(reply(&third, &[]), None);
                }
                // What is cut off is no reason to panic.
                for length in 0..bytes.len() {
                    let _ = parse(&bytes[..length]);
                }
            }
        }
    }

    #[test]
    fn checksums_are_those_of_the_standards() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        // The example of RFC 1071.
        assert_eq!(!checksum([&vec![0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]]), 0xddf2);
    }
}
