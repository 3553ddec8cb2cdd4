//! Measures the brain on made-up clusters; `cargo xtask bench brain` runs it, each case in a process of its own.
//!
//! `bench SERVICES ENDPOINTS NODES WATCHED CHANGES` prints one JSON object: what it costs to make the first full state
//! for the first node, to watch each further one, and to take the change of one endpoint to all of them.
//! CPU is the process's own, with all that it does for a change: the fact, the states, and what differs in each; every
//! change finds the caches cold, as changes of a real cluster do.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "what it is for")]

use std::{net::Ipv4Addr, num::NonZeroU16, sync::Arc, time::Duration};

use brain::{Brain, Options};
use model::{
    Family, Protocol, ServiceName,
    facts::{Conditions, Endpoint, EndpointSlice, Facts, Node, Service, ServicePort, SliceName, SlicePort},
    state::{NodeState, ServiceKind, TargetPort, TrafficPolicy},
};
use nix::time::{ClockId, clock_gettime};

const HTTP: NonZeroU16 = NonZeroU16::new(80).expect("it is not zero");
const TARGET: NonZeroU16 = NonZeroU16::new(8080).expect("it is not zero");
/// More than caches of a core hold.
const CACHES: usize = 64 << 20;
const USAGE: &str = "usage: bench SERVICES ENDPOINTS NODES WATCHED CHANGES";

/// A made-up cluster.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    services: u32,
    endpoints: u32,
    nodes: u32,
}

impl Cluster {
    fn facts(self) -> Facts {
        let mut facts = Facts::default();
        for index in 0..self.services {
            facts.set_service(service(index));
            facts.set_slice(self.slice(index, 0));
        }
        for index in 0..self.nodes {
            let zone = format!("zone-{}", index % 3);
            facts.set_node(Node {
                name: node_name(index).into(),
                zone: Some(zone.into()),
                info: model::state::Node::default(),
            });
        }
        facts
    }

    /// A slice in which one endpoint has changed, each time that of another Service.
    fn change(self, change: u32) -> Result<EndpointSlice, std::num::TryFromIntError> {
        let index = u64::from(change) * 7919 % u64::from(self.services);
        Ok(self.slice(u32::try_from(index)?, change))
    }

    /// The slice of a Service; `change` says which pod its first endpoint is by now.
    fn slice(self, index: u32, change: u32) -> EndpointSlice {
        let name = service_name(index);
        let endpoints = (0..self.endpoints).map(|it| {
            let (pod, address) = match (it, change) {
                (0, 1..) => (format!("{}-new-{change}", name.name), 0x0b00_0000 + change),
                _ => (format!("{}-{it}", name.name), 0x0a00_0000 + index * self.endpoints + it),
            };
            // Neighbours run on different nodes, and so do the pods of one Service.
            let node = (index.wrapping_mul(7) + it * (self.nodes / self.endpoints).max(1)) % self.nodes;
            endpoint(Ipv4Addr::from(address), &pod, &node_name(node))
        });
        EndpointSlice {
            name: SliceName {
                namespace: Arc::clone(&name.namespace),
                name: format!("{}-slice", name.name).into(),
            },
            service: name.clone(),
            headless: false,
            family: Family::V4,
            ports: vec![SlicePort { name: "http".into(), protocol: Protocol::Tcp, port: TARGET }],
            endpoints: endpoints.collect(),
            trigger_time: None,
        }
    }
}

/// Takes one change to every node, and counts what differs in their states.
fn take(brain: &mut Brain, given: &mut [(String, NodeState)], slice: EndpointSlice) -> usize {
    brain.set_slice(slice);
    let changed = brain.settle();
    let mut differences = 0;
    for (name, state) in given.iter_mut().filter(|(name, _)| changed.contains(name.as_str())) {
        if let Some(new) = brain.state(name) {
            differences += new.diff(state).count();
            *state = new.clone();
        }
    }
    differences
}

fn node_name(index: u32) -> String {
    format!("node-{index:04}")
}

fn service_name(index: u32) -> ServiceName {
    ServiceName::new(format!("namespace-{}", index % 50), format!("service-{index:05}"))
}

fn service(index: u32) -> Service {
    Service {
        name: service_name(index),
        created: None,
        kind: Some(ServiceKind::ClusterIp),
        proxy_name: None,
        cluster_ips: vec![Ipv4Addr::from(0x0a60_0000 + index).into()],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        ports: vec![ServicePort {
            name: "http".into(),
            protocol: Protocol::Tcp,
            port: HTTP,
            node_port: None,
            target_port: TargetPort::Number(TARGET),
        }],
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        affinity: None,
        source_ranges: Vec::new(),
        health_check_node_port: None,
    }
}

fn endpoint(address: Ipv4Addr, pod: &str, node: &str) -> Endpoint {
    Endpoint {
        address: address.into(),
        conditions: Conditions { ready: true, serving: true, terminating: false },
        node: Some(node.into()),
        pod: Some(pod.into()),
        hostname: String::new(),
        node_hints: Vec::new(),
        zone_hints: Vec::new(),
    }
}

/// CPU time of this process.
fn cpu() -> Result<Duration, nix::Error> {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from)
}

/// Resident memory of this process, in kB.
fn resident() -> Result<u64, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find_map(|it| it.strip_prefix("VmRSS:")).ok_or("no VmRSS in /proc/self/status")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<u32> =
        std::env::args().skip(1).map(|it| it.parse()).collect::<Result<_, _>>().map_err(|_| USAGE)?;
    let [services, endpoints, nodes, watched, changes] = arguments[..] else { return Err(USAGE.into()) };
    if services == 0 || endpoints == 0 || changes == 0 || watched == 0 || watched > nodes {
        return Err(format!("{USAGE}; none may be 0, nor more nodes be watched than there are").into());
    }
    let cluster = Cluster { services, endpoints, nodes };
    let mut brain = Brain::new(Options::default());
    brain.update(Arc::new(cluster.facts()));

    let start = cpu()?;
    brain.serve(&node_name(0));
    brain.settle();
    let first_state = cpu()? - start;

    let before = resident()?;
    let start = cpu()?;
    for index in 1..watched {
        brain.serve(&node_name(index));
        brain.settle();
    }
    let others = watched - 1;
    let further_state = (cpu()? - start).checked_div(others).unwrap_or_default();

    // What a publisher holds: the state that each node was given last.
    let mut given: Vec<(String, NodeState)> = (0..watched)
        .map(node_name)
        .filter_map(|name| brain.state(&name).cloned().map(|state| (name, state)))
        .collect();
    // Changes come and go before memory is measured: what they leave behind counts.
    for change in 1..=changes {
        take(&mut brain, &mut given, cluster.change(change)?);
    }
    let after = resident()?;

    let mut others_memory = vec![0_u8; CACHES];
    let mut times = Vec::new();
    let mut differences = 0;
    for change in changes + 1..=2 * changes {
        let slice = cluster.change(change)?;
        // Between two changes of a real cluster, other programs run: nothing is left in the caches.
        others_memory.chunks_mut(64).for_each(|it| it[0] = it[0].wrapping_add(1));
        let start = cpu()?;
        differences += take(&mut brain, &mut given, std::hint::black_box(slice));
        times.push(cpu()? - start);
    }
    std::hint::black_box(&others_memory);
    times.sort();
    let mean = times.iter().sum::<Duration>() / changes;
    println!(
        "{{\"firstStateMs\":{:.1},\"furtherStateMs\":{:.2},\"changeMeanUs\":{:.1},\"changeMedianUs\":{:.1},\
         \"residentMb\":{:.1},\"furtherNodeKb\":{:.1},\"differences\":{differences}}}",
        micros(first_state) / 1e3,
        micros(further_state) / 1e3,
        micros(mean),
        micros(times[times.len() / 2]),
        after as f64 / 1024.0,
        after.saturating_sub(before) as f64 / f64::from(others.max(1)),
    );
    Ok(())
}
