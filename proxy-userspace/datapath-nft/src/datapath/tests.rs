//! What a sequence of states and foreign changes does to the tables, in the kernel.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    num::NonZeroU16,
    process::Command,
};

use super::*;

mod forwarding;

use crate::{
    encode::tables::{generation, in_table, new_table},
    in_netns::{in_netns, run},
    observe::counters::ExternalConnections,
};
use model::{
    Protocol, ServiceName,
    state::{Endpoint, EndpointKey, EndpointPort, Scopes, Service, ServicePort, ServiceState},
};

fn start(is_beside_sockets: bool) -> Datapath {
    Datapath::start(&Options { is_beside_sockets, ..Options::default() }).unwrap()
}

/// A datapath whose tables nobody owns, as before Linux 6.9: others can change them, and they stay as they are when it ends.
fn start_without_owner(is_beside_sockets: bool) -> Datapath {
    Datapath { is_owner: false, ..start(is_beside_sockets) }
}

/// Repairs the tables as after a change by others.
fn repair(datapath: &mut Datapath) {
    datapath.notices.changed.set();
    datapath.repair().unwrap();
}

fn port(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).unwrap()
}

/// An endpoint of the first port of a Service, for all traffic.
fn endpoint(name: &str, v4: impl Into<Ipv4Addr>, port: NonZeroU16) -> Endpoint {
    let scopes = Scopes { internal: true, external: true, cluster: true };
    Endpoint {
        v4: Some(v4.into()),
        ports: [EndpointPort { index: 0, port, scopes }].into(),
        ..Endpoint::new(EndpointKey::Pod(name.into()))
    }
}

fn state_of(service: Service, endpoints: impl IntoIterator<Item = Endpoint>) -> NodeState {
    let service = Arc::new(ServiceState::new(service, endpoints));
    NodeState { services: [service].into_iter().collect(), ..NodeState::default() }
}

#[test]
fn base_chains_are_restored_first_and_then_everything() {
    in_netns(|| {
        let mut datapath = start_without_owner(false);
        datapath.apply(&NodeState::default()).unwrap();
        let before = datapath.read().unwrap();
        datapath.restore_base_chains().unwrap();
        assert_eq!(datapath.read().unwrap(), before, "nothing is missing");
        assert!(cleanup().unwrap(), "another process deletes them");
        datapath.restore_base_chains().unwrap();
        for (family, table) in datapath.read().unwrap() {
            let expected: BTreeSet<_> = before[&family].policies.keys().collect();
            assert_eq!(table.chains.keys().collect::<BTreeSet<_>>(), expected);
        }
        repair(&mut datapath);
        assert_eq!(datapath.read().unwrap(), before);
    });
}

#[test]
fn a_repair_and_a_new_address_look_at_flows_that_began_before() {
    in_netns(|| {
        let dns = ServicePort { node_port: Some(port(30_053)), ..ServicePort::new(Protocol::Udp, port(53)) };
        let state = state_of(Service { ports: vec![dns], ..dns_service() }, []);
        let mut datapath = start_without_owner(false);
        let mut passes = |change: &dyn Fn(&mut Datapath)| {
            change(&mut datapath);
            let is_again_due = datapath.finish_generation().unwrap();
            if is_again_due {
                datapath.finish_generation_again().unwrap();
                assert!(datapath.flow_rules.is_empty());
            }
            is_again_due
        };
        let apply = |it: &mut Datapath| drop(it.apply(&state).unwrap());
        assert!(passes(&apply), "a new Service");
        assert!(!passes(&apply), "nothing has changed");
        assert!(!passes(&repair), "nothing was missing");
        assert!(passes(&|it| {
            cleanup().unwrap();
            repair(it);
        }));
        assert!(passes(&|it| {
            it.set_interfaces(BTreeSet::from(["192.0.2.1".parse().unwrap()]));
            apply(it);
        }));
    });
}

fn dns_service() -> Service {
    Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        ports: vec![ServicePort::new(Protocol::Udp, port(53))],
        ..Service::new(ServiceName::new("default", "dns"))
    }
}

/// A state with one UDP Service; its endpoints are 10.244.0.0 plus a number.
fn dns(endpoints: impl Iterator<Item = u32>) -> NodeState {
    let endpoint = |n: u32| endpoint(&format!("pod-{n}"), Ipv4Addr::from(0x0af4_0000 + n), port(53));
    state_of(dns_service(), endpoints.map(endpoint))
}

#[test]
fn a_large_first_state_is_written_in_parts_and_its_base_chains_last() {
    in_netns(|| {
        let state = dns(1..=10_000);
        let mut datapath = start_without_owner(false);
        let transactions_of = |datapath: &mut Datapath| {
            let before = generation(&mut datapath.netfilter).unwrap();
            datapath.apply(&state).unwrap();
            generation(&mut datapath.netfilter).unwrap() - before
        };
        assert!(transactions_of(&mut datapath) > 3);
        let whole = datapath.read().unwrap();
        assert!(whole.values().all(|it| !it.policies.is_empty()));

        // Another process died before it came to the base chains.
        let desired = datapath.desired();
        let [table, ..] = &datapath.desired_tables(&desired)[..] else { panic!("no tables") };
        assert!(cleanup().unwrap());
        commit(&mut datapath.netfilter, table.fill(std::iter::empty())).unwrap();
        assert_eq!(datapath.read().unwrap()[&Family::V4].policies, BTreeMap::new());
        let mut next = start_without_owner(false);
        assert!(transactions_of(&mut next) > 3);
        assert_eq!(next.read().unwrap(), whole);

        // What serves is replaced at one moment.
        next.must_replace = true;
        next.applied = None;
        assert_eq!(transactions_of(&mut next), 1);
        assert_eq!(next.read().unwrap(), whole);
    });
}

#[test]
fn any_number_of_udp_endpoints_can_be_removed_at_once() {
    in_netns(|| {
        let mut datapath = start(true);
        datapath.apply(&dns(0..100_000)).unwrap();
        datapath.apply(&dns(0..1)).unwrap();
        let removed = datapath.removed_udp();
        datapath.refuse_removed_udp(&removed).unwrap();
        let refused = |it: &mut Datapath| it.read().unwrap().remove(&Family::V4).unwrap().removed_udp.len();
        let count = refused(&mut datapath);
        assert!((50_000..100_000).contains(&count), "{count}");
        datapath.apply(&dns(0..100_000)).unwrap();
        assert_eq!(refused(&mut datapath), 0);
    });
}

#[test]
fn senders_to_removed_udp_endpoints_are_refused_while_sockets_are_connected_to_them() {
    in_netns(|| {
        let state = |endpoints: &[u8]| dns(endpoints.iter().map(|it| u32::from(*it)));
        for is_beside_sockets in [false, true] {
            let watches = |it: &mut Datapath| {
                let tables = it.read().unwrap();
                tables.values().filter(|it| it.chains.contains_key("removed-udp-prerouting")).count()
            };
            let expected = if is_beside_sockets { 2 } else { 0 };
            let mut datapath = start(is_beside_sockets);
            datapath.apply(&state(&[1, 2])).unwrap();
            assert_eq!(watches(&mut datapath), 0);
            let refuse = |it: &mut Datapath| {
                let removed = it.removed_udp();
                it.refuse_removed_udp(&removed).unwrap();
            };
            datapath.apply(&state(&[1])).unwrap();
            assert_eq!(watches(&mut datapath), 0, "no socket is known to be connected");
            refuse(&mut datapath);
            assert_eq!(watches(&mut datapath), expected);
            datapath.refuse_removed_udp(&BTreeSet::new()).unwrap();
            assert_eq!(watches(&mut datapath), 0, "the last socket has gone");
            // Nor is one forgotten that is removed while no process runs.
            datapath.apply(&state(&[1, 2])).unwrap();
            drop(datapath);
            let mut datapath = start(is_beside_sockets);
            datapath.apply(&state(&[])).unwrap();
            refuse(&mut datapath);
            assert_eq!(watches(&mut datapath), expected);
            // The next process knows what this one has removed, also what serves again.
            drop(datapath);
            let mut datapath = start(is_beside_sockets);
            datapath.apply(&state(&[1])).unwrap();
            assert_eq!(watches(&mut datapath), expected);
            let refused = |it: &mut Datapath| {
                it.read().unwrap().remove(&Family::V4).unwrap().removed_udp.into_iter().collect::<Vec<_>>()
            };
            let at = |n: u8| SocketAddr::from(([10, 244, 0, n], 53));
            assert_eq!(refused(&mut datapath), if is_beside_sockets { vec![at(2)] } else { vec![] });
            drop(datapath);
            cleanup().unwrap();
        }
    });
}

#[test]
fn chains_of_an_earlier_process_that_are_not_needed_any_more_are_deleted_before_those_that_they_call() {
    in_netns(|| {
        let mut first = start(true);
        first.apply(&NodeState::default()).unwrap();
        let before = first.read().unwrap();
        let mut changes = Changes::default();
        for (element, value) in [Watch::RemovedUdp, Watch::Answered].map(|it| it.element(Family::V4)) {
            changes.add(element, value);
        }
        commit(&mut first.netfilter, Difference::new(changes).messages(Family::V4)).unwrap();
        assert_ne!(first.read().unwrap(), before);
        drop(first);
        let mut second = start(true);
        second.apply(&NodeState::default()).unwrap();
        assert_eq!(second.read().unwrap(), before);
    });
}

#[test]
fn rules_that_could_not_be_ended_are_repaired_without_a_notification() {
    in_netns(|| {
        let mut datapath = start_without_owner(true);
        datapath.apply(&NodeState::default()).unwrap();
        let before = datapath.read().unwrap();
        // The kernel does not know the rules that are to be ended.
        let elements = &mut datapath.applied.as_mut().unwrap().elements;
        elements.extend(Family::ALL.map(|it| Watch::RemovedUdp.element(it)));
        let desired = datapath.desired();
        datapath.change(Update::default(), desired).unwrap_err();
        datapath.notices.changed.take();
        datapath.repair().unwrap();
        assert!(datapath.applied.is_some());
        assert_eq!(datapath.read().unwrap(), before);
    });
}

#[test]
fn owned_tables_are_changed_by_their_owner_only_and_adopted_by_the_next_one() {
    in_netns(|| {
        let state = NodeState::default();
        let mut first = start(false);
        if !first.is_owner {
            return eprintln!("skipped: tables cannot persist without their owner (Linux 6.9)");
        }
        first.apply(&state).unwrap();
        cleanup().unwrap_err();
        let before = first.read().unwrap();
        // A flush of all rules by another program passes them by; where `nft` is missing, this is skipped.
        let _ = Command::new("nft").args(["flush", "ruleset"]).status();
        assert_eq!(first.read().unwrap(), before);
        let mut second = start(false);
        second.apply(&state).unwrap_err();
        drop(first);
        // An orphaned table stays, and is adopted without another change.
        assert_eq!(second.apply(&state).unwrap().entries, 0);
        cleanup().unwrap_err();
        drop(second);
        assert!(cleanup().unwrap());
    });
}

#[test]
fn a_dormant_table_and_one_with_a_drop_policy_are_replaced() {
    in_netns(|| {
        if Command::new("nft").arg("--version").output().is_err() {
            return eprintln!("skipped: nft is not installed");
        }
        let mut datapath = start_without_owner(false);
        datapath.apply(&NodeState::default()).unwrap();
        let before = datapath.read().unwrap();
        for change in [
            "nft add table ip kube-proxy-ebpf { flags dormant; }",
            "nft add chain ip kube-proxy-ebpf prerouting { policy drop; }",
        ] {
            run(change);
            assert_ne!(datapath.read().unwrap(), before, "{change}");
            repair(&mut datapath);
            assert_eq!(datapath.read().unwrap(), before, "{change}");
        }
    });
}

#[test]
fn a_table_without_an_owner_is_replaced_by_one_with_an_owner() {
    in_netns(|| {
        start_without_owner(false).apply(&NodeState::default()).unwrap();
        let mut owner = start(false);
        if !owner.is_owner {
            return eprintln!("skipped: tables cannot persist without their owner (Linux 6.9)");
        }
        owner.apply(&NodeState::default()).unwrap();
        cleanup().unwrap_err();
    });
}

#[test]
fn changes_by_others_are_noticed_during_a_large_transaction_and_after_it() {
    in_netns(|| {
        let mut datapath = start_without_owner(false);
        let large = notices::UNNOTICED as u32;
        datapath.apply(&dns(0..large)).unwrap();
        assert!(!datapath.notices.changed.take(), "nothing but this process has changed anything");
        datapath.apply(&dns(large..2 * large)).unwrap();
        let before = datapath.read().unwrap();
        assert!(!datapath.notices.changed.take());

        assert!(cleanup().unwrap(), "another process deletes the tables");
        while !datapath.notices.changed.take() {
            std::thread::yield_now();
        }
        repair(&mut datapath);
        assert_eq!(datapath.read().unwrap(), before);

        // Nothing listens while a transaction is written: that of another process meanwhile is noticed by its number.
        datapath.notices.changed.take();
        let mut other = Netfilter::open().unwrap();
        let generation_before = generation(&mut other).unwrap();
        commit(&mut other, vec![in_table("theirs", new_table(Family::V4, ""))]).unwrap();
        assert_eq!(generation(&mut other), Some(generation_before + 1));
        assert!(!datapath.notices.changed.take(), "the table is not ours");
        datapath.notices.commit_many(&mut datapath.netfilter, Batch::transaction()).unwrap();
        assert!(datapath.notices.changed.take(), "there was no transaction where one was expected");
    });
}

#[test]
fn connections_to_addresses_that_are_reachable_from_outside_are_counted() {
    in_netns(|| {
        for arguments in ["link set lo up", "route add default dev lo"] {
            let status = Command::new("ip").args(arguments.split(' ')).status();
            if !status.is_ok_and(|it| it.success()) {
                return eprintln!("skipped: `ip {arguments}` failed");
            }
        }
        let server = TcpListener::bind("0.0.0.0:0").unwrap();
        let http = ServicePort { node_port: Some(port(30_080)), ..ServicePort::new(Protocol::Tcp, port(80)) };
        let service = Service {
            cluster_ips: vec!["10.96.0.1".parse().unwrap()],
            external_ips: vec!["203.0.113.1".parse().unwrap()],
            load_balancer_ips: vec!["203.0.113.2".parse().unwrap()],
            ports: vec![http.clone()],
            ..Service::new(ServiceName::new("default", "web"))
        };
        let server_port = port(server.local_addr().unwrap().port());
        let more = [[127_u8, 0, 0, 1], [127, 0, 0, 2]].map(|it| endpoint("pod", it, server_port));
        let state = |endpoints: &[Endpoint]| state_of(service.clone(), endpoints.iter().cloned());
        let start = || {
            let mut datapath = start(false);
            datapath.set_interfaces(BTreeSet::from(["127.0.0.1".parse().unwrap()]));
            datapath
        };
        let mut datapath = start();
        let count = || ExternalConnections::read().unwrap().of(&service, &http);
        assert_eq!(count(), 0, "there are no tables yet");
        datapath.apply(&state(&more[..1])).unwrap();
        let connect = |it: &str| drop(TcpStream::connect(it).unwrap());
        connect("10.96.0.1:80");
        assert_eq!(count(), 0, "cluster IPs are not counted");
        for (address, expect) in [("203.0.113.1:80", 1), ("203.0.113.1:80", 2), ("203.0.113.2:80", 3)] {
            connect(address);
            assert_eq!(count(), expect, "{address}");
        }
        datapath.apply(&state(&more)).unwrap();
        assert_eq!(count(), 3, "a change of endpoints keeps the counters");
        repair(&mut datapath);
        assert_eq!(count(), 3, "so does a repair");
        drop(datapath);
        let mut next = start();
        assert_eq!(next.apply(&state(&more)).unwrap().entries, 0);
        assert_eq!(count(), 3, "and a restart");
        let moved = Service { external_ips: Vec::new(), ..service.clone() };
        next.apply(&state_of(moved, more.iter().cloned())).unwrap();
        assert_eq!(count(), 3, "and the loss of an address");
        next.apply(&state(&more)).unwrap();
        connect("203.0.113.1:80");
        assert_eq!(count(), 4);
        next.apply(&state(&[])).unwrap();
        TcpStream::connect("203.0.113.1:80").unwrap_err();
        assert_eq!(count(), 0, "without endpoints nothing is translated, and the counter begins anew");
        repair(&mut next);
        next.apply(&NodeState::default()).unwrap();
        let left = next.read().unwrap().into_values().flat_map(|it| it.elements.into_keys());
        assert_eq!(left.filter(|it| it.map.is_counters()).count(), 0);
    });
}
