//! A backend that computes rules from each state, and applies only the difference:
//! `difference unix:///run/kube-proxy-ebpf/proxy.sock NODE`.
//!
//! The rules are lines here; they could be those of any table in the kernel.

use std::error::Error;

use proto::{
    DiffStore,
    client::{Client, State},
};

/// Which address leads to which endpoints.
fn rules(state: &State) -> impl Iterator<Item = (String, String)> {
    state.services.values().flat_map(|it| {
        let ips = it.service.ips.iter().filter_map(|ips| ips.cluster_ips.as_ref());
        let ips = ips.flat_map(|ips| ips.v4.iter().chain(&ips.v6));
        let endpoints = it.endpoints.keys().map(|it| &**it).collect::<Vec<_>>().join(" ");
        ips.map(move |ip| (ip.clone(), endpoints.clone())).collect::<Vec<_>>()
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let target = arguments.next().ok_or("the first argument is an address, as in unix:///path")?;
    let mut states = Client::new(target.parse()?, arguments.next().unwrap_or_default()).watch();
    let mut store = DiffStore::new();
    while let Some(state) = states.next().await {
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
    Ok(())
}
