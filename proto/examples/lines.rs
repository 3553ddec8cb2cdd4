//! A backend that says where connections go; docs/contract.md has the rules. `backend-conformance` asks it:
//! `kube-proxy-ebpf backend-conformance --lines -- target/debug/examples/lines`.
//!
//! A question on standard input, such as `lookup 10.1.0.7 10.96.0.1 80 TCP`, is answered by one line: the endpoints, sorted;
//! `refuse` or `drop`; or nothing, if no Service has the address.

use std::{
    env,
    error::Error,
    io::stdin,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use ipnet::IpNet;
use proxy_contract::{
    backend::{Family, Frontend, ServedPort, ports},
    client::{Client, ServiceEndpoints, State},
};

/// A question.
struct Lookup {
    source: IpAddr,
    destination: IpAddr,
    port: u16,
    protocol: String,
    is_inside: bool,
    is_node: bool,
}

/// The answer by one Service, if it has the destination.
fn of_service(it: &ServiceEndpoints, lookup: &Lookup) -> Option<String> {
    let is_of_family = |it: &ServedPort| it.family == Family::of(lookup.destination);
    for port in ports(it).into_iter().filter(is_of_family) {
        let is_asked = |it: &&Frontend| {
            it.port == lookup.port && it.address.ip().map_or(lookup.is_node, |ip| ip == lookup.destination)
        };
        let Some(frontend) = port.frontends.iter().find(is_asked) else { continue };
        if port.protocol.as_str_name() != lookup.protocol {
            continue;
        }
        if frontend.sources.as_ref().is_some_and(|it| !it.iter().any(|it| it.contains(&lookup.source))) {
            return Some("drop".to_owned());
        }
        let targets = port.endpoints(frontend.address, lookup.is_inside);
        let mut targets: Vec<_> = targets.iter().map(ToString::to_string).collect();
        targets.sort();
        return Some(match (targets.is_empty(), port.drops) {
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
    let is_inside =
        inside.split(',').filter_map(|it| it.parse::<IpNet>().ok()).any(|it| it.contains(&source));
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
