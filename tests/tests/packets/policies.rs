//! Where packets go: policies, refusals, source ranges; the rules of Services, row by row.

use std::{
    io::Read as _,
    net::{Ipv4Addr, SocketAddr},
};

use socket2::{Domain, Protocol, Socket, Type};
use tests::{
    NetNs, TestCluster, Transport,
    manifest::Service,
    test_cluster::{CLIENT, N1, N2, P1, P2, P3, TARGET},
};

use crate::{
    BACKENDS, LIMIT, NODE_PORT, Served, at, check, check_dropped, check_refused, doors, ips, on_both_nodes,
    outer, outer_external, outside, service,
};

#[test]
fn a_cluster_ip_leads_to_any_endpoint_and_keeps_the_source() {
    for backend in BACKENDS {
        let web = on_both_nodes(service("web", 1));
        let Some(it) = Served::or_skip("cluster_ip", backend, &[web], &[]) else { return };
        for (index, ip) in ips(1).into_iter().enumerate() {
            // p3 would answer the client by another way.
            check(&it.cluster.pods[1], at(ip, 80), &[("p1", P2[index]), ("p3", P2[index])]);
            check(&it.cluster.n1, at(ip, 80), &[("p1", N1[index]), ("p3", N1[index])]);
        }
    }
}

#[test]
fn an_internal_policy_local_keeps_to_this_node() {
    for backend in BACKENDS {
        let here = on_both_nodes(service("here", 1)).internal_local();
        let elsewhere = service("elsewhere", 2).endpoint_on("n2", "p3", &P3).internal_local();
        let Some(it) = Served::or_skip("internal_local", backend, &[here, elsewhere], &[]) else { return };
        for (index, ip) in ips(1).into_iter().enumerate() {
            check(&it.cluster.pods[1], at(ip, 80), &[("p1", P2[index])]);
            check(&it.cluster.client, at(ip, 80), &[("p1", CLIENT[index])]);
        }
        check_dropped(&it.cluster.client, at(ips(2)[0], 80));
    }
}

#[test]
fn traffic_from_outside_reaches_any_endpoint_and_is_masqueraded() {
    for backend in BACKENDS {
        let Some(it) = Served::or_skip("outside", backend, &[on_both_nodes(outside("web", 1))], &[]) else {
            return;
        };
        for door in doors(1) {
            let index = usize::from(door.is_ipv6());
            // What n1 is called on the cable to its pod.
            let seen_here = if index == 0 { Ipv4Addr::new(169, 254, 1, 1).into() } else { N1[1] };
            check(&it.cluster.client, door, &[("p1", seen_here), ("p3", N1[index])]);
        }
    }
}

#[test]
fn an_external_policy_local_keeps_to_this_node_and_keeps_the_source() {
    for backend in BACKENDS {
        let here = on_both_nodes(outside("here", 1)).external_local();
        let elsewhere = outside("elsewhere", 2).endpoint_on("n2", "p3", &P3).external_local();
        let Some(it) = Served::or_skip("external_local", backend, &[here, elsewhere], &[]) else { return };
        for door in doors(1) {
            check(&it.cluster.client, door, &[("p1", CLIENT[usize::from(door.is_ipv6())])]);
        }
        // A node without endpoints leaves a load balancer without an answer, so that it asks another one.
        check_dropped(&it.cluster.client, at(N1[0], NODE_PORT + 2));
        check_dropped(&it.cluster.client, at(outer(2)[1], 80));
        // Traffic from inside is not what the policy is for.
        for place in [&it.cluster.pods[0], &it.cluster.n1] {
            for door in doors(2) {
                assert_eq!(TestCluster::request(place, Transport::Tcp, door).unwrap().name, "p3", "{door}");
            }
        }
    }
}

#[test]
fn a_node_port_of_another_node_is_left_to_it() {
    for backend in BACKENDS {
        let web = on_both_nodes(outside("web", 1)).external_local();
        let Some(it) = Served::or_skip("other_node", backend, &[web], &[]) else { return };
        // Nobody translates there.
        for place in [&it.cluster.pods[0], &it.cluster.n1] {
            check_refused(place, at(N2[0], NODE_PORT + 1));
        }
    }
}

#[test]
fn a_service_without_endpoints_refuses() {
    for backend in BACKENDS {
        let Some(it) = Served::or_skip("no_endpoints", backend, &[outside("web", 1)], &[]) else { return };
        for address in doors(1).into_iter().chain(ips(1).map(|ip| at(ip, 80))) {
            for place in [&it.cluster.client, &it.cluster.pods[0], &it.cluster.n1] {
                check_refused(place, address);
            }
        }
    }
}

#[test]
fn a_port_that_a_service_does_not_have_refuses() {
    for backend in BACKENDS {
        let Some(it) = Served::or_skip("unknown_port", backend, &[on_both_nodes(service("web", 1))], &[])
        else {
            return;
        };
        for ip in ips(1) {
            for place in [&it.cluster.client, &it.cluster.pods[0], &it.cluster.n1] {
                check_refused(place, at(ip, 81));
            }
        }
    }
}

#[test]
fn source_ranges_hold_for_everybody_at_a_load_balancer_ip_and_nowhere_else() {
    for backend in BACKENDS {
        let web =
            outside("web", 1).endpoint("p1", &P1).source_ranges(&["192.168.50.100/32", "10.244.1.11/32"]);
        let Some(it) = Served::or_skip("source_ranges", backend, &[web], &[]) else { return };
        let balancer = at(outer(1)[0], 80);
        assert_eq!(TestCluster::request(&it.cluster.client, Transport::Tcp, balancer).unwrap().name, "p1");
        assert_eq!(TestCluster::request(&it.cluster.pods[1], Transport::Tcp, balancer).unwrap().name, "p1");
        check_dropped(&it.cluster.pods[0], balancer);
        check_dropped(&it.cluster.n1, balancer);
        // Other addresses, and the family that the list says nothing of, are open.
        for open in [at(outer_external(1)[0], 80), at(N1[0], NODE_PORT + 1), at(outer(1)[1], 80)] {
            assert_eq!(
                TestCluster::request(&it.cluster.n1, Transport::Tcp, open).unwrap().name,
                "p1",
                "{open}"
            );
        }
    }
}

#[test]
fn a_pod_reaches_itself_through_its_own_service() {
    for backend in BACKENDS {
        let Some(it) = Served::or_skip("hairpin", backend, &[outside("web", 1).endpoint("p1", &P1)], &[])
        else {
            return;
        };
        for ip in ips(1) {
            assert_eq!(
                TestCluster::request(&it.cluster.pods[0], Transport::Tcp, at(ip, 80)).unwrap().name,
                "p1"
            );
        }
    }
}

/// CRC32c, bit by bit (RFC 9260, appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |it, _| if it & 1 == 1 { it >> 1 ^ 0x82f6_3b78 } else { it >> 1 })
    })
}

/// The first packet of an SCTP association, without its IP header.
fn sctp_init(from: u16, to: u16) -> Vec<u8> {
    let ports = [from.to_be_bytes(), to.to_be_bytes()].concat();
    // Type, flags and length of the chunk; tag, window, streams out and in, first number.
    let chunk = [1, 0, 0, 20, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1];
    let mut packet = [&ports[..], &[0; 8], &chunk].concat();
    let crc = crc32c(&packet).to_le_bytes();
    packet[8..12].copy_from_slice(&crc);
    packet
}

#[test]
fn sctp_is_translated() {
    for backend in BACKENDS {
        let web = Service::new("web", &ips(1)).port("sctp", "SCTP", 80, TARGET).node_port(NODE_PORT + 1);
        let Some(it) = Served::or_skip("sctp", backend, &[web.endpoint("p1", &P1)], &[]) else { return };
        // No kernel needs to know SCTP to send and to see its packets.
        let raw = |place: &NetNs| {
            let _there = place.enter().unwrap();
            Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(132))).unwrap()
        };
        let (client, pod) = (raw(&it.cluster.client), raw(&it.cluster.pods[0]));
        pod.set_read_timeout(Some(LIMIT)).unwrap();
        for (from, to) in [(4_000, at(ips(1)[0], 80)), (4_001, at(N1[0], NODE_PORT + 1))] {
            let packet = sctp_init(from, to.port());
            client.send_to(&packet, &SocketAddr::new(to.ip(), 0).into()).unwrap();
            let mut seen = [0; 256];
            let length = (&pod).read(&mut seen).unwrap();
            // After the IP header, which is of 20 bytes: the ports.
            let port = u16::from_be_bytes([seen[22], seen[23]]);
            assert!(length > 24 && port == TARGET, "{to} leads to {:?}", &seen[..length]);
        }
    }
}
