//! Which backend a client gets while some are ejected for it.

use super::*;

/// A client that avoids some of these backends, and how often it selects each of them in 6,000 connections.
fn share_of_each(backends: &'static [u32], max_ejected: u8, ejected: &[u32], affinity: u32) -> Vec<u32> {
    let mut tables = OneFrontend::new(TCP, backends, affinity);
    tables.frontend.health = HealthPolicy { failures: 3, max_ejected };
    tables.eject(ejected, 100);
    tables.states.now = 99;
    let mut socket = FakeSocket { now: 99, client: CLIENT, ..FakeSocket::default() };
    let mut counts = vec![0; backends.len()];
    for number in 0..6000 {
        socket.random = mix(number, 5);
        let Verdict::Redirect(selection) = verdict(&tables, &socket, 7, 80, 0) else { panic!("a redirect") };
        assert_eq!(selection.watch, Watch::new(selection.backend_counter, tables.frontend.health, false));
        counts[backends.iter().position(|it| counter_of(*it) == selection.backend_counter).unwrap()] += 1;
    }
    assert!(tables.states.tried.borrow().is_empty(), "their time is not out");
    counts
}

#[track_caller]
fn check_shares(backends: &'static [u32], max_ejected: u8, ejected: &[u32], expect: &[u32]) {
    let shares = share_of_each(backends, max_ejected, ejected, 0);
    // More than six standard deviations.
    assert!(
        shares
            .iter()
            .zip(expect)
            .all(|(it, expect)| it.abs_diff(*expect) < 250 && (*expect != 0 || *it == 0)),
        "{shares:?}"
    );
}

#[test]
fn the_share_of_ejected_backends_goes_to_all_others_alike() {
    check_shares(&[10, 11, 12], 100, &[], &[2000, 2000, 2000]);
    check_shares(&[10, 11, 12], 100, &[11], &[3000, 0, 3000]);
    check_shares(&[10, 11, 12], 100, &[10, 12], &[0, 6000, 0]);
    check_shares(&[10, 11, 12, 13, 14, 15], 100, &[11, 12, 13], &[2000, 0, 0, 0, 2000, 2000]);
}

#[test]
fn where_all_backends_are_ejected_none_is() {
    check_shares(&[10, 11, 12], 100, &[10, 11, 12], &[2000, 2000, 2000]);
    check_shares(&[10], 100, &[10], &[6000]);
}

/// Of four, one may be avoided: the connections that selected an ejected one go to those that stay, whichever they are.
#[test]
fn no_more_are_ejected_than_the_policy_allows() {
    check_shares(&[10, 11, 12], 33, &[11], &[2000, 2000, 2000]);
    check_shares(&[10, 11, 12], 34, &[11], &[3000, 0, 3000]);
    let shares = share_of_each(&[10, 11, 12, 13], 25, &[10, 11], 0);
    assert!(shares.iter().all(|it| *it > 500), "{shares:?}");
    assert!(shares[..2].iter().all(|it| *it < 1500), "{shares:?}");
}

/// They are often on one node, and adjacent.
#[test]
fn the_neighbors_of_a_large_set_may_all_be_ejected() {
    const ALL: [u32; 100] = {
        let mut all = [0; 100];
        let mut n = 0;
        while n < 100 {
            all[n] = 10 + n as u32;
            n += 1;
        }
        all
    };
    let shares = share_of_each(&ALL, 100, &ALL[20..50], 0);
    assert!(shares[20..50].iter().all(|it| *it == 0), "{shares:?}");
    for (count, dead) in [(17, 8), (30, 15), (31, 15), (33, 16)] {
        let shares = share_of_each(&ALL[..count], 100, &ALL[..dead], 0);
        let even = 6000 / (count - dead) as u32;
        assert!(shares[..dead].iter().all(|it| *it == 0), "{shares:?}");
        assert!(shares[dead..].iter().all(|it| (even / 3..even * 2).contains(it)), "{count}: {shares:?}");
    }
    assert!(shares[..20].iter().chain(&shares[50..]).all(|it| (30..180).contains(it)), "{shares:?}");
}

#[test]
fn an_ejected_backend_is_tried_when_its_time_is_out() {
    let mut tables = OneFrontend::new(TCP, &[10, 11], 0);
    tables.frontend.health = HealthPolicy { failures: 3, max_ejected: 100 };
    tables.eject(&[10], 100);
    tables.states.now = 100;
    let socket = FakeSocket { client: CLIENT, ..FakeSocket::default() };
    let watched = to_watched(10, Watch::new(counter_of(10), tables.frontend.health, false));
    assert_eq!(verdict(&tables, &socket, 7, 80, 0), watched);
    assert_eq!(*tables.states.tried.borrow(), [counter_of(10)]);
}

#[test]
fn a_client_loses_its_backend_only_for_as_long_as_it_is_ejected() {
    let backends = &[10, 11, 12, 13];
    let mut tables = OneFrontend::new(TCP, backends, 1000);
    tables.frontend.health = HealthPolicy { failures: 3, max_ejected: 100 };
    let mut socket = FakeSocket { now: 1, client: CLIENT, ..FakeSocket::default() };
    let mut connect = |now, random, ejected: &[u32]| {
        (socket.now, socket.random) = (now, random);
        tables.eject(ejected, 100);
        tables.states.now = now;
        let Verdict::Redirect(selection) = verdict(&tables, &socket, 7, 80, 0) else { panic!("a redirect") };
        selection.backend_counter
    };
    let first = connect(1, 0, &[]);
    let ejected = [first - counter_of(0)];
    let other = connect(2, 0, &ejected);
    assert_ne!(other, first);
    for random in 0..20 {
        assert_eq!(connect(3, mix(random, 1), &ejected), other, "the same for all of its connections");
    }
    assert_eq!(connect(100, u32::MAX, &ejected), first, "its time is out");
    // A new client is given one that is not ejected, and keeps that.
    let shares = share_of_each(backends, 100, &[10, 11], 1000);
    assert_eq!(shares[..2], [0, 0]);
    assert_eq!(shares.iter().filter(|it| **it == 6000).count(), 1, "{shares:?}");
}
