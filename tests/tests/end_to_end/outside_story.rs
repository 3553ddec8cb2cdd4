//! Connections from outside through all that happens to a cluster, and the same with NAT, where they break.

use std::{
    cell::RefCell,
    net::SocketAddr,
    ops::Range,
    time::{Duration, Instant},
};

use tests::{
    Build, ConnectLoad, EchoConnection, IngressCluster, OUTSIDE_CLIENTS, Service, TIMEOUT, Talk, Transport,
    load::ConnectSample, repetitions, scaled,
};

use crate::outside::{FIRST_THREE, NETWORKS, frontends, running_cluster_or_skip, wait_until_forwarded, web};

/// How many connections last from the beginning to the end; a hundred on a slow machine.
const CONNECTIONS: usize = 1_000;

/// The cluster, with what goes on meanwhile.
struct Story {
    talks: Vec<Talk>,
    /// Short connections of each client to each address.
    loads: Vec<(ConnectLoad, SocketAddr, usize)>,
    /// While other nodes got endpoints.
    changes: RefCell<Vec<Range<Instant>>>,
    // Dropped last: connections need it.
    cluster: IngressCluster,
}

impl Story {
    /// Five nodes, the first three with an endpoint each. The router knows four.
    fn begin() -> Option<Self> {
        let cluster = running_cluster_or_skip(5, |it| web(it, &[0, 1, 2]))?;
        let mut story = Self { talks: Vec::new(), loads: Vec::new(), changes: RefCell::default(), cluster };
        wait_until_forwarded(&story.cluster, &FIRST_THREE);
        story.cluster.set_next_hops(NETWORKS, &[0, 1, 2, 3]);
        story.connect(repetitions(CONNECTIONS).max(100));
        for (number, client) in story.cluster.clients.iter().enumerate() {
            for frontend in frontends() {
                let interval = scaled(Duration::from_millis(10));
                let load = client.run(|| ConnectLoad::start(Transport::Tcp, frontend, 1, interval));
                story.loads.push((load, frontend, number));
            }
        }
        Some(story)
    }

    /// Begins more connections that last, half of them from each client and to each address.
    fn connect(&mut self, count: usize) {
        for (client, sources) in self.cluster.clients.iter().zip(OUTSIDE_CLIENTS) {
            let _outside = client.enter().unwrap();
            let connections = (0..count / 2).map(|it| EchoConnection::connect(frontends()[it % 2]).unwrap());
            let connections: Vec<_> = connections.collect();
            for (number, it) in connections.iter().enumerate() {
                assert_eq!(source(it.name()), sources[number % 2].to_string(), "{it:?}");
            }
            self.talks.push(Talk::start(connections, Duration::from_millis(20)));
        }
    }

    #[track_caller]
    fn assert_alive(&self, after: &str) {
        self.talks.iter().for_each(|it| it.assert_alive(after));
    }

    #[track_caller]
    fn set_next_hops(&self, nodes: &[usize]) {
        self.cluster.set_next_hops(NETWORKS, nodes);
        self.assert_alive(&format!("the router's next hops are {nodes:?}"));
    }

    /// Changes the endpoints, and waits until every node knows them.
    #[track_caller]
    fn change(&self, service: Service, nodes: &[(usize, u32)], what: &str) {
        let begin = Instant::now();
        self.cluster.write(&[service]);
        self.cluster.wait_until_applied();
        wait_until_forwarded(&self.cluster, nodes);
        self.changes.borrow_mut().push(begin..Instant::now());
        self.assert_alive(what);
    }

    /// Makes the nodes, by index, have so many endpoints.
    #[track_caller]
    fn scale(&mut self, nodes: &[(usize, u8)]) {
        let service = nodes.iter().fold(web(&self.cluster, &[]), |mut service, (index, count)| {
            let node = &mut self.cluster.nodes[*index];
            for (number, addresses) in node.run_pods(*count).into_iter().enumerate() {
                service =
                    service.endpoint_on(&node.name(), &format!("pod-{}-{number}", node.name()), &addresses);
            }
            service
        });
        let shares: Vec<_> = nodes.iter().map(|(index, count)| (*index, u32::from(*count))).collect();
        self.change(service, &shares, &format!("endpoints by node are {nodes:?}"));
    }

    /// The endpoint of the third node ends, then it is gone, and then there is another one. One of the fourth node comes and goes.
    fn drain(&self) {
        let mut draining = web(&self.cluster, &[2]).terminating();
        draining.endpoints.extend(web(&self.cluster, &[0, 1]).endpoints);
        self.change(draining, &[(0, 1), (1, 1)], "an endpoint ends");
        self.change(web(&self.cluster, &[0, 1]), &[(0, 1), (1, 1)], "it is gone");
        let shares = [(0, 1), (1, 1), (2, 1), (3, 1)];
        self.change(web(&self.cluster, &[0, 1, 2]), &shares[..3], "there is another one");
        // The fourth node gets rows of the others; what they know stays theirs.
        self.change(web(&self.cluster, &[0, 1, 2, 3]), &shares, "a fourth node has one");
        self.change(web(&self.cluster, &[0, 1, 2]), &shares[..3], "that is gone, too");
    }

    /// Other Services come, get other endpoints, and go.
    fn change_services(&self) {
        const OTHERS: u8 = 20;
        let others = |endpoints: &[usize]| {
            let other = |number: u8| {
                let addresses = [format!("203.0.113.{}", 100 + number), format!("2001:db8::1:{number:x}")];
                let mut service =
                    web(&self.cluster, endpoints).load_balancer_ips(&addresses.map(|it| it.parse().unwrap()));
                service.name = format!("other-{number}");
                service.cluster_ips = [format!("10.96.1.{number}"), format!("fd00:96::1:{number:x}")]
                    .map(|it| it.parse().unwrap())
                    .to_vec();
                service
            };
            (0..OTHERS).map(other).collect::<Vec<_>>()
        };
        let web = web(&self.cluster, &[0, 1, 2]);
        for endpoints in [&[0, 3][..], &[1, 2, 4], &[2]] {
            self.cluster.write(&[vec![web.clone()], others(endpoints)].concat());
            let last = format!("203.0.113.{}:80", 100 + OTHERS - 1).parse().unwrap();
            let shares: Vec<_> = endpoints.iter().map(|it| (*it, 1)).collect();
            self.cluster.wait_until_forwarded(last, &shares);
            self.assert_alive(&format!("other Services have endpoints on {endpoints:?}"));
        }
        self.cluster.write(&[web]);
        self.cluster.wait_until_applied();
        self.assert_alive("other Services are gone");
    }

    /// Each proxy is killed, and started again from another binary.
    fn replace_proxies(&mut self, build: Build) {
        for node in 0..self.cluster.nodes.len() {
            self.cluster.kill(node);
            self.assert_alive(&format!("n{} is dead", node + 1));
            self.cluster.start_binary(&build.binary(), node, &[]);
            self.cluster.agent(node).wait_until_applied(TIMEOUT).unwrap();
            self.assert_alive(&format!("n{} runs {build:?}", node + 1));
        }
    }

    /// No short connection failed, and every server saw its client. One that comes to a node without endpoints, since another node
    /// knows of more or less, is translated.
    fn end(self) {
        let changes = self.changes.into_inner();
        for (load, frontend, client) in self.loads {
            let client = OUTSIDE_CLIENTS[client][usize::from(frontend.is_ipv6())].to_string();
            let samples = load.stop();
            let is_wrong = |it: &&ConnectSample| match &it.result {
                Ok(reply) if source(reply) == client => false,
                Ok(_) => !changes.iter().any(|change| change.start < it.ended() && it.started < change.end),
                Err(_) => true,
            };
            let wrong: Vec<_> = samples.iter().filter(is_wrong).map(|it| &it.result).collect();
            eprintln!("{} short connections of {client} to {frontend}", samples.len());
            assert!(wrong.is_empty(), "{} of {} to {frontend}: {wrong:?}", wrong.len(), samples.len());
            assert!(samples.len() > 100);
        }
    }
}

/// The source address that a server has seen.
fn source(reply: &str) -> &str {
    reply.split_once(' ').unwrap().1
}

#[test]
fn connections_survive_all_that_happens_to_a_cluster() {
    let Some(mut story) = Story::begin() else { return };
    // It drops a node, takes it back, and gets another one.
    for hops in [&[0, 2, 3][..], &[0, 1, 2, 3], &[3], &[1, 2], &[0, 1, 2, 3, 4]] {
        story.set_next_hops(hops);
    }
    story.drain();
    story.scale(&[(0, 14), (1, 10), (2, 6)]);
    story.connect(100);
    story.scale(&[(0, 1), (1, 1), (2, 1)]);
    story.change_services();
    story.replace_proxies(Build::NextLayout);
    story.end();
}

#[test]
fn with_nat_connections_break_with_the_nodes_that_they_enter_by() {
    let nat = |cluster: &IngressCluster| {
        web(cluster, &[0, 1, 2]).annotation("kube-proxy-ebpf.io/external-forwarding", "nat")
    };
    let Some(cluster) = running_cluster_or_skip(5, nat) else { return };
    cluster.set_next_hops(NETWORKS, &[0, 1, 2, 3]);
    let mut connections = Vec::new();
    for client in &cluster.clients {
        let _outside = client.enter().unwrap();
        connections.extend((0..100).map(|it| EchoConnection::connect(frontends()[it % 2]).unwrap()));
    }
    let clients = OUTSIDE_CLIENTS.concat();
    assert!(connections.iter().all(|it| !clients.contains(&source(it.name()).parse().unwrap())));
    for it in &connections {
        // A packet that nothing answers.
        it.stream().set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    }
    // While all of those before are there again, what the first of them knew goes on.
    for hops in [&[0, 2, 3][..], &[0, 1, 2, 3, 4]] {
        cluster.set_next_hops(NETWORKS, hops);
        let before = connections.len();
        connections.retain_mut(|it| it.ping().is_ok());
        let broken = before - connections.len();
        eprintln!("{broken} of {before} connections broke");
        assert!(broken > 0, "every connection has survived {hops:?}");
        cluster.set_next_hops(NETWORKS, &[0, 1, 2, 3]);
    }
}
