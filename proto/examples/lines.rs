//! A backend that says where connections go; docs/contract.md has the rules. `backend-conformance` asks it:
//! `kube-proxy-ebpf backend-conformance --lines -- target/debug/examples/lines`.
//!
//! A question on standard input, such as `lookup 10.1.0.7 10.96.0.1 80 TCP`, is answered by one line: the endpoints, sorted;
//! `refuse` or `drop`; or nothing, if no Service has the address.

use std::{
    env,
    error::Error,
    io::stdin,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use proxy_contract::{
    client::{Client, ServiceEndpoints, State},
    localv1::IpSet,
};

/// A question.
struct Lookup {
    source: IpAddr,
    destination: IpAddr,
    port: i32,
    protocol: String,
    is_inside: bool,
    is_node: bool,
}

fn has(set: Option<&IpSet>, address: IpAddr) -> bool {
    set.iter().flat_map(|it| it.iter()).any(|it| it.parse() == Ok(address))
}

/// Whether an address is in a CIDR such as 10.0.0.0/8.
fn contains(cidr: &str, address: IpAddr) -> bool {
    let Some((network, length)) = cidr.split_once('/') else { return false };
    let bits = |it: IpAddr| match it {
        IpAddr::V4(it) => (u128::from(it.to_bits()) << 96, true),
        IpAddr::V6(it) => (it.to_bits(), false),
    };
    let (Ok(network), Ok(length)) = (network.parse().map(bits), length.parse::<u32>()) else { return false };
    let (address, differing) = (bits(address), bits(address).0 ^ network.0);
    address.1 == network.1 && differing.leading_zeros() >= length
}

/// The answer by one Service, if it has the destination.
fn of_service(it: &ServiceEndpoints, lookup: &Lookup) -> Option<String> {
    let (service, ips) = (&it.service, it.service.ips.as_ref()?);
    let is_v4 = lookup.destination.is_ipv4();
    for (index, port) in service.ports.iter().enumerate() {
        if port.protocol().as_str_name() != lookup.protocol {
            continue;
        }
        let is_port = port.port == lookup.port;
        let has = |set: &Option<IpSet>| is_port && has(set.as_ref(), lookup.destination);
        let is_cluster_ip = has(&ips.cluster_ips);
        let serves_family =
            ips.cluster_ips.as_ref().is_some_and(|it| !if is_v4 { &it.v4 } else { &it.v6 }.is_empty());
        let is_node_port = lookup.is_node && serves_family && port.node_port == lookup.port;
        if !is_cluster_ip && !has(&ips.external_ips) && !has(&ips.load_balancer_ips) && !is_node_port {
            continue;
        }
        let mut filters = service.ip_filters.iter().filter(|it| has(&it.target_ips)).peekable();
        let is_filtered = filters.peek().is_some() && !is_cluster_ip;
        if is_filtered && !filters.flat_map(|it| &it.source_ranges).any(|it| contains(it, lookup.source)) {
            return Some("drop".to_owned());
        }
        let targets = it.endpoints.values().filter_map(|it| {
            let scopes = it.scopes_at(service, index);
            let may_serve = match (is_cluster_ip, lookup.is_inside) {
                (true, _) => scopes.internal,
                (false, true) => scopes.cluster.unwrap_or_default(),
                (false, false) => scopes.external,
            };
            let ips = it.ips.as_ref().filter(|_| may_serve)?;
            let ip = if is_v4 { &ips.v4 } else { &ips.v6 }.first()?.parse().ok()?;
            Some(SocketAddr::new(ip, it.port(service, index)?).to_string())
        });
        let mut targets: Vec<_> = targets.collect();
        targets.sort();
        let usable = port.has_any_endpoint.is_some_and(|it| if is_v4 { it.v4 } else { it.v6 });
        return Some(match (targets.is_empty(), usable) {
            (false, _) => targets.join(" "),
            (true, true) => "drop".to_owned(),
            (true, false) => "refuse".to_owned(),
        });
    }
    None
}

fn answer(state: &State, line: &str) -> Option<String> {
    let mut words = line.strip_prefix("lookup ")?.split(' ');
    let (source, destination) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let (port, protocol) = (words.next()?.parse().ok()?, words.next()?.to_owned());
    let inside = env::var("KUBE_PROXY_EBPF_CLUSTER_CIDRS").unwrap_or_default();
    let is_inside = inside.split(',').any(|it| contains(it, source));
    let own = env::var("KUBE_PROXY_EBPF_NODE_ADDRESSES").unwrap_or_default();
    let is_node = own.split(',').any(|it| it.parse() == Ok(destination));
    let lookup = Lookup { source, destination, port, protocol, is_inside, is_node };
    state.services.values().find_map(|it| of_service(it, &lookup))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let target = env::var("KUBE_PROXY_EBPF_TARGET")?;
    let mut states = Client::new(target.parse()?, env::var("NODE_NAME")?).watch();
    let shared = Arc::new(Mutex::new(Arc::<State>::default()));
    let newest = Arc::clone(&shared);
    thread::spawn(move || {
        for line in stdin().lines().map_while(Result::ok) {
            let state = Arc::clone(&newest.lock().unwrap_or_else(PoisonError::into_inner));
            println!("{}", answer(&state, &line).unwrap_or_default());
        }
        std::process::exit(0);
    });
    loop {
        let state = states.next().await;
        *shared.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }
}
