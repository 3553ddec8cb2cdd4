//! Agents of several brains, as `deploy/overlays/central` runs them: a brain that dies or hangs costs a reconnect.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tests::{
    Agent, AgentCommand, Build, ConnectLoad, EchoConnection, FRONTEND, NODE, TIMEOUT, TestNode, Transport,
    expected_dump, http, run, scaled, web4,
};

const PORTS: [u16; 3] = [7441, 7442, 7443];
/// The names in the certificates.
const BRAIN: &str = "kube-proxy-ebpf-brain";
const AGENT: &str = "kube-proxy-ebpf-agent";

/// Where the brain at a port answers the kubelet's probes.
fn probe_address(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port + 1_000).into()
}

/// Writes the files of mutual TLS: an authority, and a certificate with its key for brains and for agents.
fn write_certificates(folder: &Path) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    fs::write(folder.join("ca.crt"), authority.pem()).unwrap();
    for name in [BRAIN, AGENT] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        fs::write(folder.join(format!("{name}.crt")), certificate.pem()).unwrap();
        fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

/// Brains and agents in the sandbox of a node, which has their certificates.
struct Brains<'a>(&'a TestNode);

impl Brains<'_> {
    /// The flags of one side; the authority's differs.
    fn flags(&self, name: &str, authority: &str) -> [String; 6] {
        let file = |it: &str| self.0.sandbox().files().join(it).display().to_string();
        let [certificate, key] = ["crt", "key"].map(|it| file(&format!("{name}.{it}")));
        ["--tls-cert".into(), certificate, "--tls-key".into(), key, authority.into(), file("ca.crt")]
    }

    fn flags_of_client(&self) -> Vec<String> {
        let more = ["--tls-server-name".to_owned(), BRAIN.to_owned()];
        self.flags(AGENT, "--tls-ca").into_iter().chain(more).collect()
    }

    fn start(&self, port: u16, source: &str) -> Agent {
        let (listen, probe) = (format!("tcp://127.0.0.1:{port}"), probe_address(port).to_string());
        AgentCommand::new(&Build::Product.binary())
            .args(["brain", "--serve-any-node", "--source", source, "--listen", &listen])
            .args(["--tls-allow", AGENT, "--probe-bind-address", &probe])
            .args(self.flags(BRAIN, "--tls-client-ca"))
            .node(NODE)
            .start(self.0.sandbox())
            .unwrap()
    }

    fn targets(ports: &[u16]) -> String {
        ports.iter().map(|it| format!("127.0.0.1:{it}")).collect::<Vec<_>>().join(",")
    }

    fn start_agent(&self) -> Agent {
        AgentCommand::new(&Build::Product.binary())
            .args(["agent", "--target", &Self::targets(&PORTS)])
            .args(self.flags_of_client())
            .node(NODE)
            .kernel(self.0.sandbox())
            .start(self.0.sandbox())
            .unwrap()
    }

    /// Which of these brains the agent follows.
    fn followed(&self, ports: &[u16]) -> Vec<usize> {
        let follows = |port: u16| {
            let mut command = Command::new(Build::Product.binary());
            command.args(["nodes", "--target", &Self::targets(&[port])]).args(self.flags_of_client());
            run(&mut command).stdout.lines().any(|it| it.starts_with(NODE))
        };
        ports.iter().enumerate().filter(|(_, port)| follows(**port)).map(|(index, _)| index).collect()
    }

    /// Changes the endpoints, and waits until the kernel has them.
    #[track_caller]
    fn change(&self, agent: &mut Agent, endpoints: &[u8], limit: Duration) -> Duration {
        let services = [web4(endpoints.iter().copied())];
        let start = Instant::now();
        self.0.write(&services);
        let expected = expected_dump(&services);
        agent
            .wait_until(limit, || self.0.dump(Build::Product).is_ok_and(|it| it == expected))
            .unwrap_or_else(|error| panic!("{endpoints:?}: {error}"));
        start.elapsed()
    }
}

#[test]
fn a_brain_that_dies_or_hangs_costs_its_clients_a_reconnect_and_nothing_else() {
    let Some(node) = TestNode::prepared_or_skip(1..=3, &[web4([1])]) else { return };
    let source = node.source();
    write_certificates(node.sandbox().files());
    let brains = Brains(&node);
    // The third one never has a state, and so gets no client.
    let mut running: Vec<_> = PORTS[..2].iter().map(|it| Some(brains.start(*it, &source))).collect();
    let _starting = brains.start(PORTS[2], "api:unix:///no/such.sock");
    let mut agent = brains.start_agent();
    agent.wait_until_applied(TIMEOUT).unwrap();
    // A rollout waits for it, and a restart would not help it.
    let status = |port, page| http::get(probe_address(port), page).unwrap().status;
    assert_eq!([status(PORTS[2], "/readyz"), status(PORTS[2], "/livez")], [503, 200]);
    let mut connection = EchoConnection::connect(FRONTEND).unwrap();
    let load = ConnectLoad::start(Transport::Tcp, FRONTEND, 1, scaled(Duration::from_millis(1)));

    // One that dies in the midst of changes.
    let mut died = 0;
    for (n, endpoints) in [&[1, 2][..], &[2], &[2, 3], &[3], &[1, 3]].into_iter().enumerate() {
        if n == 2 {
            let followed = brains.followed(&PORTS);
            assert!(matches!(followed[..], [0 | 1]), "{followed:?}");
            died = followed[0];
            running[died].take().unwrap().kill9().unwrap();
        }
        let took = brains.change(&mut agent, endpoints, TIMEOUT);
        // Sooner than heartbeats are missed.
        assert!(took < Duration::from_secs(25), "{endpoints:?} took {took:?}: {}", agent.log());
    }
    assert_eq!(brains.followed(&PORTS), [1 - died]);

    // One that hangs is left once its heartbeats are missing for 30 s; the other one is back.
    running[died] = Some(brains.start(PORTS[died], &source));
    running[died].as_mut().unwrap().wait_until_logged(TIMEOUT, "serving gRPC").unwrap();
    let hanging = running[1 - died].take().unwrap();
    hanging.signal(Signal::SIGSTOP).unwrap();
    brains.change(&mut agent, &[2], TIMEOUT);
    assert_eq!(brains.followed(&PORTS[died..=died]), [0]);

    // Without any brain the node keeps its last state, and the first one that is back serves it.
    hanging.kill9().unwrap();
    running[died].take().unwrap().kill9().unwrap();
    agent.wait_until_logged(TIMEOUT, "stays active").unwrap();
    connection.ping().unwrap();
    let _brain = brains.start(PORTS[0], &source);
    brains.change(&mut agent, &[1], TIMEOUT);

    connection.ping().unwrap();
    load.stop_without_failure(100);
}
