//! iperf3 from outside, wrapped: large segments stay whole on their way, and datagrams of the full size that fits pass.

use std::{
    fs::{self, File},
    io::Read as _,
    net::IpAddr,
    path::PathBuf,
    process::{Command, Stdio},
};

use build_tools::command::KilledOnDrop;
use serde_json::Value;
use tests::{
    IngressCluster, NetNs, TIMEOUT, agent, eventually, ingress_cluster::IngressNode, program_or_skip,
};

use crate::outside::{NETWORKS, frontends, running_cluster_or_skip, web};

const PORT: u16 = 5_201;
/// The payload that fits into 1,500 bytes with the wrapping, in each family.
const DATAGRAMS: [usize; 2] = [1_500 - 44 - 20 - 8, 1_500 - 76 - 40 - 8];

/// A server of iperf3. It serves one client after another.
struct Server {
    log: PathBuf,
    _process: KilledOnDrop,
}

impl Server {
    fn start(node: &IngressNode, address: IpAddr) -> Self {
        let log = node.sandbox.files().join(format!("iperf3-{}.log", address.is_ipv6()));
        let mut command = Command::new("iperf3");
        command.args(["--server", "--forceflush", "--bind", &address.to_string()]);
        command.stdin(Stdio::null()).stdout(File::create(&log).unwrap());
        let process = KilledOnDrop(node.pods.run(|| command.spawn()).unwrap());
        Self { log, _process: process }
    }

    /// Waits until it is ready for the client of this number. Until then it refuses it as busy.
    fn wait_for_client(&self, number: usize) {
        let text = || fs::read_to_string(&self.log).unwrap();
        let ready = || text().matches("listening").count() == number;
        assert!(eventually(TIMEOUT, ready), "iperf3 is not ready for client {number}: {}", text());
    }
}

/// What a client has measured.
fn send(from: &NetNs, to: IpAddr, arguments: &[&str]) -> Value {
    let mut command = Command::new("iperf3");
    command.args(["--json", "--client", &to.to_string()]).args(arguments);
    let measured: Value = serde_json::from_str(&from.run(|| agent::run(&mut command)).success()).unwrap();
    // In JSON, a client that fails ends with success.
    assert!(measured["error"].is_null(), "iperf3 {arguments:?}: {}", measured["error"]);
    measured
}

/// How many bytes and packets have arrived at the uplink of a node.
fn arrived(node: &IngressNode) -> [u64; 2] {
    let mut text = String::new();
    node.netns.run(|| File::open("/proc/thread-self/net/dev").unwrap().read_to_string(&mut text)).unwrap();
    let counters = text.lines().find_map(|it| it.trim().strip_prefix("eth0:")).unwrap();
    let mut counters = counters.split_whitespace().map(|it| it.parse().unwrap());
    [counters.next().unwrap(), counters.next().unwrap()]
}

#[test]
fn large_segments_stay_whole_and_full_datagrams_pass() {
    let Some(_iperf3) = program_or_skip("iperf3") else { return };
    // It uses several connections, which must reach one server.
    let service = |it: &IngressCluster| {
        web(it, &[0]).port("iperf-tcp", "TCP", PORT, PORT).port("iperf-udp", "UDP", PORT, PORT)
    };
    let Some(cluster) = running_cluster_or_skip(2, service) else { return };
    for it in frontends() {
        cluster.wait_until_forwarded((it.ip(), PORT).into(), &[(0, 1)]);
    }
    cluster.wait_until_settled();
    // By the node without an endpoint: all is wrapped.
    cluster.set_next_hops(NETWORKS, &[1]);
    let (server, client) = (&cluster.nodes[0], &cluster.clients[0]);
    for ((frontend, address), datagram) in frontends().iter().zip(server.pod_addresses()).zip(DATAGRAMS) {
        let iperf = Server::start(server, address);
        iperf.wait_for_client(1);
        let before = arrived(server);
        let tcp = send(client, frontend.ip(), &["--bytes", "100M"]);
        let after = arrived(server);
        let received = tcp["end"]["sum_received"]["bytes"].as_u64().unwrap();
        assert!(received > 50 << 20, "{received} bytes of 100 MiB");
        let [bytes, packets] = [0, 1].map(|it| after[it] - before[it]);
        eprintln!("{frontend}: {received} bytes, {} bytes per packet", bytes / packets);
        assert!(bytes >= received, "what arrives at the node is wrapped");
        assert!(bytes / packets > 2 * 1_500, "{bytes} bytes in {packets} packets");

        iperf.wait_for_client(2);
        let length = datagram.to_string();
        let arguments = ["--udp", "--bitrate", "100M", "--bytes", "10M", "--length", &length];
        let udp = send(client, frontend.ip(), &arguments);
        let [sent, lost] = ["packets", "lost_packets"].map(|it| udp["end"]["sum"][it].as_u64().unwrap());
        eprintln!("{frontend}: {sent} datagrams of {length} bytes, {lost} lost");
        // A server that does not run loses some.
        assert!(sent > 0 && lost < sent / 2, "{lost} of {sent} datagrams are lost");
    }
}
