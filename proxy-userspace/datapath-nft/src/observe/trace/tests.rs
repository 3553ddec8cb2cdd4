//! Reports of packets, made up and in the kernel.

use std::net::UdpSocket;

use proptest::prelude::*;

use super::*;
use crate::in_netns::{in_netns, run};

fn destination(address: &str, port: u16) -> TracedDestination {
    TracedDestination { address: address.parse().unwrap(), port: Some(port), protocol: Some(Protocol::Udp) }
}

fn packets(trace: &mut PacketTrace, count: usize) -> Vec<TracedPacket> {
    let (mut packets, end) = (Vec::new(), Instant::now() + Duration::from_secs(20));
    while packets.len() < count && Instant::now() < end {
        match trace.poll().unwrap() {
            Some(PacketTraceItem::Packet(it)) => packets.push(*it),
            other => assert_eq!(other, None),
        }
    }
    packets
}

#[test]
fn only_first_packets_to_the_destinations_are_followed() {
    in_netns(|| {
        run("ip link set lo up");
        let server = UdpSocket::bind("127.0.0.1:8080").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut trace = PacketTrace::start(&[destination("127.0.0.1", 8080)]).unwrap();
        client.send_to(b"x", "127.0.0.1:8081").unwrap();
        client.send_to(b"x", "127.0.0.1:8080").unwrap();
        let packets = packets(&mut trace, 1);
        let packet = &packets[0];
        assert_eq!(packet.destination, "127.0.0.1:8080".parse().unwrap());
        assert_eq!(packet.source, client.local_addr().unwrap());
        assert_eq!((packet.protocol, &packet.verdict), (17, &PacketVerdict::Passed));
        assert_eq!((packet.endpoint, packet.masqueraded, &packet.interface), (None, None, &None));
        drop((server, trace));
        let tables = netlink::nf_tables::chains().unwrap();
        assert_eq!(tables, [], "the table ends with the trace");
    });
}

#[test]
fn too_many_destinations_are_refused() {
    in_netns(|| {
        let many = vec![destination("127.0.0.1", 8080); MAX_DESTINATIONS + 1];
        let error = PacketTrace::start(&many).unwrap_err().to_string();
        assert!(error.contains("1025"), "{error}");
    });
}

fn bytes(attributes: &[Attribute]) -> Vec<u8> {
    Attribute::nested(0, attributes.to_vec()).value
}

#[test]
fn a_report_is_read() {
    let mut network = [0; 20];
    network[0] = 0x45;
    network[9] = 6;
    network[12..16].copy_from_slice(&[192, 0, 2, 1]);
    network[16..20].copy_from_slice(&[10, 96, 0, 10]);
    let verdict = [
        Attribute::u32(NFTA_VERDICT_CODE, NFT_JUMP.cast_unsigned()),
        Attribute::text(NFTA_VERDICT_CHAIN, "services"),
    ];
    let message = bytes(&[
        Attribute::text(NFTA_TRACE_TABLE, TABLE),
        Attribute::text(NFTA_TRACE_CHAIN, "prerouting"),
        Attribute::nested(NFTA_TRACE_VERDICT, verdict),
        Attribute::u32(NFTA_TRACE_ID, 7),
        Attribute::bytes(NFTA_TRACE_NETWORK_HEADER, network),
        Attribute::bytes(NFTA_TRACE_TRANSPORT_HEADER, [0x30, 0x39, 0, 80, 0, 0, 0, 0]),
        Attribute::u32(NFTA_TRACE_IIF, 3),
    ]);
    let header = Header {
        protocol: 6,
        source: "192.0.2.1:12345".parse().unwrap(),
        destination: "10.96.0.10:80".parse().unwrap(),
    };
    let expect = Report {
        id: 7,
        table: TABLE.into(),
        chain: "prerouting".into(),
        verdict: "to services".into(),
        header: Some(header),
        interface: Some(3),
    };
    assert_eq!(Report::parse(&message), Some(expect));
    let policy = bytes(&[
        Attribute::text(NFTA_TRACE_TABLE, "filter"),
        Attribute::text(NFTA_TRACE_CHAIN, "FORWARD"),
        Attribute::u32(NFTA_TRACE_ID, 7),
        Attribute::u32(NFTA_TRACE_POLICY, 0),
    ]);
    assert_eq!(Report::parse(&policy).unwrap().verdict, DROP);
}

proptest! {
    #[test]
    fn a_report_of_any_bytes_is_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        let _ = Report::parse(&bytes);
        let _ = Header::parse(&bytes, &bytes);
    }
}
