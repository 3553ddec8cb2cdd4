//! A server with a large cluster, as a process: `api-server SERVICES ENDPOINTS NODES --streaming|--paging`.
//!
//! It prints its URL. A line `slices RATE SECONDS` on standard input makes it change RATE EndpointSlices per second for
//! SECONDS seconds, a line `heartbeats RATE SECONDS` the time in the status of as many Nodes; then it prints how many bytes
//! it has sent so far.

use std::{
    io::{BufRead as _, stdin},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use api_server::{ApiServer, Settings, WatchList};
use serde_json::{Value, json};

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [services, endpoints, nodes, mode] = &*arguments else {
        bail!("usage: api-server SERVICES ENDPOINTS NODES --streaming|--paging");
    };
    let number = |text: &str| text.parse::<u32>().with_context(|| format!("{text:?} is not a number"));
    let (services, endpoints, nodes) = (number(services)?, number(endpoints)?, number(nodes)?);
    let server = ApiServer::start(Settings {
        watch_list: if mode == "--streaming" { WatchList::Supported } else { WatchList::Rejected },
        bookmark_interval: Duration::from_secs(60),
        ..Settings::default()
    })?;
    for n in 0..nodes {
        server.set(node(n, 0));
    }
    for n in 0..services {
        server.set(service(n));
        server.set(slice(n, endpoints, nodes, 0));
    }
    println!("{}", server.url());
    for line in stdin().lock().lines() {
        let line = line?;
        let words: Vec<_> = line.split(' ').collect();
        let [what, rate, seconds] = &*words else { bail!("write slices|heartbeats RATE SECONDS") };
        let (rate, seconds) = (number(rate)?, number(seconds)?);
        let began = Instant::now();
        for n in 0..rate * seconds {
            let due = began + Duration::from_secs_f64(f64::from(n) / f64::from(rate));
            thread::sleep(due.saturating_duration_since(Instant::now()));
            // Consecutive changes are far apart in the order of names.
            server.set(match *what {
                "heartbeats" => node((n * 7_919) % nodes, n + 1),
                _ => slice((n * 7_919) % services, endpoints, nodes, n + 1),
            });
        }
        println!("{}", server.sent());
    }
    Ok(())
}

/// A Node as large as those of a cluster, with the time of a heartbeat.
fn node(n: u32, heartbeat: u32) -> Value {
    let time =
        format!("2026-01-01T{:02}:{:02}:{:02}Z", heartbeat / 3600 % 24, heartbeat / 60 % 60, heartbeat % 60);
    let conditions = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"].map(|it| {
        json!({
            "type": it, "status": if it == "Ready" { "True" } else { "False" }, "reason": format!("Kubelet{it}"),
            "message": "kubelet has sufficient resources available", "lastHeartbeatTime": time,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    });
    // A kubelet reports up to 50.
    let images = (0..50).map(|it| {
        let digest = format!("{it:064x}");
        json!({
            "names": [format!("registry.example.org/team-{it}/image-{it}@sha256:{digest}")],
            "sizeBytes": 30_000_000 + it,
        })
    });
    let images: Vec<_> = images.collect();
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": format!("n{n}"), "labels": {
            "topology.kubernetes.io/zone": format!("zone-{}", n % 3), "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64", "kubernetes.io/hostname": format!("n{n}"),
        }},
        "spec": {"podCIDR": format!("10.{}.{}.0/24", 100 + n / 250, n % 250)},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": format!("10.64.{}.{}", n / 250, 1 + n % 250)},
                {"type": "Hostname", "address": format!("n{n}")},
            ],
            "conditions": conditions, "images": images,
        },
    })
}

fn service(n: u32) -> Value {
    let ip = format!("10.96.{}.{}", n / 250, 1 + n % 250);
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": format!("service-{n}"), "namespace": format!("namespace-{}", n % 100),
            "uid": format!("00000000-0000-0000-0000-{n:012}"), "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app.kubernetes.io/name": format!("service-{n}"), "app.kubernetes.io/managed-by": "Helm"},
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack", "internalTrafficPolicy": "Cluster", "sessionAffinity": "None",
            "selector": {"app.kubernetes.io/name": format!("service-{n}")},
            "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
        },
        "status": {"loadBalancer": {}},
    })
}

/// An EndpointSlice whose first endpoint differs with each `edition`.
fn slice(n: u32, endpoints: u32, nodes: u32, edition: u32) -> Value {
    let endpoint = |it: u32| {
        let id = n * endpoints + it;
        let last = if it == 0 { 1 + edition % 250 } else { 1 + id % 250 };
        let node = (n + it) % nodes;
        json!({
            "addresses": [format!("10.{}.{}.{last}", 128 + id / 62_500, id / 250 % 250)],
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "nodeName": format!("n{node}"), "zone": format!("zone-{}", node % 3),
            "targetRef": {
                "kind": "Pod", "namespace": format!("namespace-{}", n % 100),
                "name": format!("service-{n}-6d4cf56db6-{it:05}"), "uid": format!("00000000-0000-0001-0000-{id:012}"),
            },
        })
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("service-{n}-abcde"), "namespace": format!("namespace-{}", n % 100),
            "uid": format!("00000000-0000-0002-0000-{n:012}"), "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                "kubernetes.io/service-name": format!("service-{n}"),
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "app.kubernetes.io/name": format!("service-{n}"),
            },
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"},
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Service", "name": format!("service-{n}"), "controller": true,
                "uid": format!("00000000-0000-0000-0000-{n:012}"), "blockOwnerDeletion": true,
            }],
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>(),
    })
}
