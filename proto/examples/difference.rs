//! A backend that computes rules from each state and applies only the difference:
//! `difference unix:///run/kube-proxy-ebpf/proxy.sock NODE`.
//!
//! Here the rules are printed; they could be the entries of any table in the kernel.

use std::{collections::BTreeMap, error::Error};

use proxy_contract::{
    DiffStore,
    client::{Client, ServiceEndpoints, State},
};

/// The endpoints of each frontend (address, port and protocol), IPv4 only.
fn rules(state: &State) -> BTreeMap<String, String> {
    let mut rules = BTreeMap::new();
    for ServiceEndpoints { service, endpoints } in state.services.values().map(|it| &**it) {
        let ips = service.ips.iter().filter_map(|it| it.cluster_ips.as_ref()).flat_map(|it| &it.v4);
        for ip in ips {
            for (index, port) in service.ports.iter().enumerate() {
                // For traffic to a cluster IP.
                let internal = endpoints.values().filter(|it| it.scopes_at(service, index).internal);
                let targets = internal.filter_map(|it| {
                    let ip = it.ips.as_ref()?.v4.first()?;
                    Some(format!("{ip}:{}", it.port(service, index)?))
                });
                let frontend = format!("{ip}:{}/{}", port.port, port.protocol().as_str_name());
                rules.insert(frontend, targets.collect::<Vec<_>>().join(" "));
            }
        }
    }
    rules
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut arguments = std::env::args().skip(1);
    let target = arguments.next().ok_or("the first argument must be an address, such as unix:///path")?;
    let mut states = Client::new(target.parse()?, arguments.next().unwrap_or_default()).watch();
    let mut store = DiffStore::new();
    loop {
        let state = states.next().await;
        store.reset();
        for (address, endpoints) in rules(&state) {
            store.set(address, endpoints);
        }
        store.done();
        for (address, endpoints) in store.created() {
            println!("add {address} -> {endpoints}");
        }
        for (address, endpoints) in store.updated() {
            println!("change {address} -> {endpoints}");
        }
        for (address, _) in store.deleted() {
            println!("remove {address}");
        }
        println!("done");
    }
}
