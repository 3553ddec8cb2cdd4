//! The backend in a kernel with IPVS: the conformance cases, and what they do not ask. Needs root, `ipvsadm`, `nft`, `ip`, and
//! the product as the brain; `cargo xtask vmtest 6.1 kube_proxy_ipvs` has them.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

#[path = "../../../proto/tests/common/process.rs"]
mod process;

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, setns};
use process::{Process, skip};

const BACKEND: &str = env!("CARGO_BIN_EXE_kube-proxy-ipvs");
const NO_PAGES: [&str; 2] = ["--healthz-bind-address=", "--metrics-bind-address="];
/// Emulated machines are slow; only a failure takes as long.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The product, which is the brain and asks the conformance cases.
fn product() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    workspace.join("target/test-binaries/product/kube-proxy-ebpf")
}

/// Whether this machine can run a test; says why if not.
fn can_run() -> bool {
    let run = |program: &str| Command::new(program).arg("--list").output();
    let reason = match run("ipvsadm") {
        _ if !product().exists() => {
            format!("{} is missing: run the tests by cargo xtask", product().display())
        }
        Err(error) => format!("cannot start ipvsadm: {error}"),
        Ok(it) if !it.status.success() => "this kernel has no IPVS, or the user is not root".to_owned(),
        Ok(_) => return true,
    };
    skip(&reason);
    false
}

#[test]
fn kube_proxy_ipvs_passes_every_conformance_case() {
    if !can_run() {
        return;
    }
    let output = Command::new(product())
        .args(["backend-conformance", "--packets", "--timeout", "600", "--", BACKEND])
        .args(NO_PAGES)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.ends_with(" passed, 0 failed, 0 skipped\n"), "{text}");
}

/// Runs a program for each line, and returns what they print.
fn run(lines: &str) -> String {
    let run = |line: &str| {
        let mut words = line.split_whitespace();
        let output = Command::new(words.next()?).args(words).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        Some(String::from_utf8(output.stdout).unwrap())
    };
    lines.lines().filter_map(run).collect()
}

/// Runs a function in the network namespace of a node or pod.
fn at<T: Send + 'static>(namespace: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let namespace = File::open(format!("/run/netns/{namespace}")).unwrap();
    let thread = thread::spawn(move || {
        setns(namespace, CloneFlags::CLONE_NEWNET).unwrap();
        work()
    });
    thread.join().unwrap()
}

/// A node with two pods and a client outside; a pod answers its name and the client's address, and then what it gets.
struct Network(PathBuf);

impl Network {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("kube-proxy-ipvs-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        run("ip netns add node\nip -n node link set lo up");
        at("node", || fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
        for (name, address) in [("one", "10.1.0.1"), ("two", "10.1.0.2"), ("out", "192.0.2.9")] {
            run(&format!(
                "ip netns add {name}
                 ip link add {name} netns node type veth peer name eth0 netns {name}
                 ip -n node address add 10.1.0.254/32 dev {name}
                 ip -n node link set {name} up
                 ip -n node route add {address} dev {name}
                 ip -n {name} address add {address}/32 dev eth0
                 ip -n {name} link set eth0 up
                 ip -n {name} route add 10.1.0.254 dev eth0
                 ip -n {name} route add default via 10.1.0.254"
            ));
            let listener = at(name, || TcpListener::bind("0.0.0.0:8080").unwrap());
            thread::spawn(move || {
                listener.incoming().for_each(|it| drop(thread::spawn(|| serve(it.unwrap(), name))));
            });
        }
        Self(folder)
    }

    /// Writes the cluster state: a Service with an endpoint.
    fn write(&self, endpoint: &str) {
        let text = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: default}}\nspec: {{type: NodePort, clusterIP: 10.96.0.1, \
             clusterIPs: [10.96.0.1], ports: [{{port: 80, targetPort: 8080, nodePort: 30080}}]}}\n---\n\
             apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: web-1, namespace: default, labels: \
             {{kubernetes.io/service-name: web}}}}\naddressType: IPv4\nports: [{{port: 8080}}]\n\
             endpoints: [{{addresses: [{endpoint}], nodeName: n1}}]\n"
        );
        fs::write(self.0.join("draft"), text).unwrap();
        fs::rename(self.0.join("draft"), self.0.join("state.yaml")).unwrap();
    }

    fn start(&self, program: impl AsRef<OsStr>, arguments: &[&str]) -> Process {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", "node"]).arg(program).args(arguments).env("NODE_NAME", "n1");
        command.env("KUBE_PROXY_EBPF_TARGET", format!("unix://{}/socket", self.0.display()));
        Process(command.spawn().unwrap())
    }

    fn backend(&self) -> Process {
        self.start(BACKEND, &["--cluster-cidr=10.1.0.0/16", "--sync-period=1", NO_PAGES[0], NO_PAGES[1]])
    }
}

fn serve(stream: TcpStream, name: &str) {
    let peer = stream.peer_addr().unwrap().ip();
    let mut out = stream.try_clone().unwrap();
    let _ = writeln!(out, "{name} {peer}");
    BufReader::new(stream).lines().map_while(Result::ok).for_each(|it| drop(writeln!(out, "{it}")));
}

/// A connection, and what the pod said of it; the error's kind if there is none.
fn connect(from: &str, to: &str) -> (Option<BufReader<TcpStream>>, String) {
    let to: SocketAddr = to.parse().unwrap();
    match at(from, move || TcpStream::connect_timeout(&to, Duration::from_secs(2))) {
        Ok(stream) => {
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let mut stream = BufReader::new(stream);
            let line = read(&mut stream);
            (Some(stream), line)
        }
        Err(error) => (None, format!("{:?}", error.kind())),
    }
}

fn read(stream: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    match stream.read_line(&mut line) {
        Ok(_) => line.trim().to_owned(),
        Err(error) => format!("{:?}", error.kind()),
    }
}

#[track_caller]
fn eventually(from: &str, to: &str, expected: &str) -> BufReader<TcpStream> {
    let begin = Instant::now();
    loop {
        match connect(from, to) {
            (Some(stream), line) if line == expected => return stream,
            (_, line) => assert!(begin.elapsed() < TIMEOUT, "{from} to {to}: {line}, not {expected}"),
        }
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn kube_proxy_ipvs_keeps_connections_and_repairs_the_kernel() {
    const CLUSTER_IP: &str = "10.96.0.1:80";
    const NODE_PORT: &str = "10.1.0.254:30080";
    if !can_run() {
        return;
    }
    let network = Network::new();
    network.write("10.1.0.1");
    let folder = network.0.display().to_string();
    let source = format!("--source=file:{folder}/state.yaml");
    let listen = format!("--listen=unix://{folder}/socket");
    let _brain = network.start(product(), &["brain", &source, &listen]);
    let backend = network.backend();
    let mut held = eventually("two", CLUSTER_IP, "one 10.1.0.2");
    let mut echoes = |text: &str| {
        writeln!(held.get_mut(), "{text}").unwrap();
        assert_eq!(read(&mut held), text);
    };
    // From an endpoint to its own Service, and from outside.
    eventually("one", CLUSTER_IP, "one 10.1.0.254");
    eventually("out", NODE_PORT, "one 10.1.0.254");
    run("ip netns exec node ipvsadm -A -f 5 -s rr");

    network.write("10.1.0.2");
    eventually("out", NODE_PORT, "two 10.1.0.254");
    echoes("the endpoint left the Service");
    drop(backend);
    eventually("out", CLUSTER_IP, "two 10.1.0.254");
    let backend = network.backend();
    for damage in ["ip rule delete pref 10256", "nft flush table inet kube-proxy-ipvs"] {
        run(&format!("ip netns exec node {damage}"));
        eventually("out", NODE_PORT, "two 10.1.0.254");
        eventually("two", CLUSTER_IP, "two 10.1.0.254");
    }
    echoes("another process continued it");
    run("ip netns exec node ipvsadm -C\nip netns exec node ipvsadm -A -f 5 -s rr");
    eventually("out", NODE_PORT, "two 10.1.0.254");
    drop(backend);
    for _ in 0..2 {
        run(&format!("ip netns exec node {BACKEND} --cleanup"));
    }
    assert_eq!(run("ip netns exec node ipvsadm -Sn\nip netns exec node nft list tables"), "-A -f 5 -s rr\n");
    assert!(!run("ip -n node rule\nip -n node -6 rule").contains("10256"));
}
