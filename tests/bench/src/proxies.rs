//! `cargo xtask bench proxies`: this proxy, and others if their binaries are given, follow the same API server with the same
//! objects, and the same client asks them.
//! Invariant: a proxy is a name and a command line; nothing else distinguishes ours from others.

use std::{
    fs::{self, File},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use ::tests::{
    Agent, NetNs, Sandbox,
    agent::{AgentCommand, VERBOSE, brain_socket},
    client::reset_on_close,
    netns::NetNsGuard,
    sandbox::CgroupGuard,
};
use anyhow::{Context as _, Result, bail, ensure};
use api_server::{ApiServer, Settings};
use build_tools::{
    build,
    command::{KilledOnDrop, status},
};
use clap::Args;
use fastrand::Rng;
use serde_json::json;
use socket2::{Domain, Socket, Type};

use crate::{
    figures::{Figures, median, milliseconds, percentiles},
    kernel_figures::{cpu_seconds, memory_mb},
    objects::{self, TARGET_PORT},
    proxy_command::{Place, Proxy},
    proxy_figures::{Change, Connect, Pair, Quantiles, SizeFigures, Spread, Start},
};

/// The number of endpoints up to 10,000 Services, and beyond.
const ENDPOINTS: [u32; 2] = [10, 2];
/// The Service that changes has one endpoint, at one of these: the first connect after a change shows it.
const CHANGING: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 255, 0, 1), Ipv4Addr::new(10, 255, 0, 2)];
/// How long a start and a change may take.
const TIMEOUT: Duration = Duration::from_secs(200);
/// How long a connect may take: an address that no one translates has a route, and no one answers there.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(20);
const CHANGES: usize = 30;
/// Slow proxies are given fewer changes.
const CHANGES_TIME: Duration = Duration::from_secs(40);
const MIN_CHANGES: usize = 5;
/// Between two changes: proxies collect changes for 100 ms.
const CHANGE_INTERVAL: Duration = Duration::from_millis(250);
/// Between two connects that look for a change.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// A proxy may go on loading after it has begun to serve, as ours does for packets: so changes begin once it is idle, which is
/// at most this part of a processor for this long, or after this time.
const IDLE_SHARE: f64 = 0.05;
const IDLE_TIME: Duration = Duration::from_secs(2);
const MAX_SETTLE_TIME: Duration = Duration::from_secs(60);
const ROUNDS: usize = 30;
/// Connects of each kind in a round.
const CONNECTS: usize = 100;

/// What `bench proxies` measures.
#[derive(Clone, Debug, Args)]
pub(crate) struct ProxiesArguments {
    /// Measure this kube-proxy, too, in nftables and iptables mode: `PATH --config FILE`
    #[arg(long, value_name = "PATH")]
    pub(crate) kube_proxy: Option<PathBuf>,
    /// Measure this KPNG, too, with its nft, iptables and ebpf backends: `PATH kube --kubeconfig=FILE to-local to-nft`
    #[arg(long, value_name = "PATH")]
    pub(crate) kpng: Option<PathBuf>,
    /// Numbers of Services
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1_000, 5_000, 10_000, 30_000, 50_000],
          value_parser = clap::value_parser!(u32).range(2..=60_000))]
    services: Vec<u32>,
}

/// Measures the figures; a proxy that fails is measured at no larger number of Services.
pub(crate) fn bench(arguments: &ProxiesArguments) -> Result<Figures> {
    let mut proxies = Proxy::own(&build::build(true)?);
    let others = [(&arguments.kube_proxy, Proxy::kube_proxy as fn(_) -> _), (&arguments.kpng, Proxy::kpng)];
    for (path, find) in others {
        let Some(path) = path else { continue };
        match find(path) {
            Ok(found) => proxies.extend(found),
            Err(error) => status("Failed", &format!("{} is not measured: {error:#}", path.display())),
        }
    }
    let mut report = Figures::new("");
    let mut sizes = arguments.services.clone();
    sizes.sort_unstable();
    for proxy in proxies {
        report.versions.extend(proxy.version.clone());
        let figures = report.proxies.entry(proxy.name.clone()).or_default();
        for services in &sizes {
            let endpoints = ENDPOINTS[usize::from(*services > 10_000)];
            let measured = measure(&proxy, *services, endpoints, |bench, figures| {
                bench.measure(CHANGES, figures)?;
                figures.connect = Some(bench.measure_connects()?);
                Ok(())
            });
            let has_failed = measured.failure.is_some();
            figures.insert(*services, measured);
            if has_failed {
                break;
            }
        }
    }
    Ok(report.method(
        "A small API server feeds each proxy the same objects, one proxy at a time, in a network namespace and a cgroup of its \
         own; endpoints are in another namespace behind a veth pair, and the same client connects. CPU and memory are those of \
         all processes of the proxy.",
    ))
}

/// Measures a proxy at a number of Services and of endpoints of each, as `work` says; the figures have its failure.
pub(crate) fn measure(
    proxy: &Proxy,
    services: u32,
    endpoints: u32,
    work: impl FnOnce(&mut Bench, &mut SizeFigures) -> Result<()>,
) -> SizeFigures {
    status("Measuring", &format!("{} with {services} Services", proxy.name));
    let mut measured = SizeFigures::default();
    let result = Bench::start(proxy, services, endpoints).and_then(|mut it| work(&mut it, &mut measured));
    if let Err(error) = result {
        status("Failed", &format!("{} with {services} Services: {error:#}", proxy.name));
        measured.failure = error.to_string().lines().next().map(ToOwned::to_owned);
    }
    measured
}

/// A proxy on a node, the cluster that it serves, and the client. The fields are dropped in this order.
pub(crate) struct Bench {
    proxy: KilledOnDrop,
    _brain: Option<Agent>,
    begin: Instant,
    log: PathBuf,
    cgroup: PathBuf,
    services: u32,
    /// Of each Service but the changing one.
    endpoints: u32,
    /// Which endpoint the changing Service has.
    changes: u32,
    server: ApiServer,
    /// Of all endpoints but those that the changing Service has.
    listener: TcpListener,
    _netns_guard: NetNsGuard,
    _cgroup_guard: CgroupGuard,
    _node: NetNs,
    _pods: NetNs,
    sandbox: Sandbox,
}

impl Bench {
    pub(crate) fn start(proxy: &Proxy, services: u32, endpoints: u32) -> Result<Self> {
        let sandbox = Sandbox::new("bench-proxies")?;
        let (node, pods) = (NetNs::new()?, NetNs::new()?);
        node.connect_veth("eth0", &pods, "eth0")?;
        node.add_interface_address("192.168.60.1/24", "eth0")?;
        pods.add_interface_address("192.168.60.2/24", "eth0")?;
        node.ip(&["route", "add", "default", "via", "192.168.60.2"])?;
        pods.ip(&["route", "add", "local", "10.128.0.0/9", "dev", "lo"])?;
        if proxy.listens_at_services() {
            node.ip(&["route", "add", "local", objects::CLUSTER_IPS, "dev", "lo"])?;
        }
        let listener = pods.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, TARGET_PORT)))?;
        listener.set_nonblocking(true)?;
        let _cgroup_guard = sandbox.enter()?;
        let _netns_guard = node.enter()?;

        let server =
            ApiServer::start(Settings { bookmark_interval: Duration::from_secs(60), ..Settings::default() })?;
        server.set(json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": {"kubernetes.io/hostname": "n1"}},
            "spec": {"podCIDR": "10.200.0.0/24", "podCIDRs": ["10.200.0.0/24"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.168.60.1"}, {"type": "Hostname", "address": "n1"}]},
        }));
        for n in 1..services {
            server.set(objects::service(n));
            let all = (0..endpoints)
                .map(|it| objects::endpoint(n, it, &objects::address(n * endpoints + it).to_string(), 2));
            server.set(objects::slice(n, all.collect()));
        }
        server.set(objects::service(0));
        set_changing(&server, CHANGING, 0);
        let _brain = proxy.brain.as_deref().map(|it| start_brain(it, &sandbox, &server)).transpose()?;
        let kubeconfig = server.kubeconfig(sandbox.files())?;

        let cgroup = sandbox.cgroup().join("proxy");
        fs::create_dir(&cgroup)?;
        let log = sandbox.files().join("proxy.log");
        let output = File::create(&log)?;
        let place = Place {
            files: sandbox.files(),
            kubeconfig: &kubeconfig,
            cgroup: sandbox.cgroup(),
            pins: sandbox.pins(),
            brain: &brain_socket(&sandbox),
        };
        let line = proxy.command_line(&place)?;
        let mut command = Command::new("sh");
        // It is in the cgroup before it runs.
        command
            .args(["-c", "echo $$ >\"$0\" && exec \"$@\""])
            .arg(cgroup.join("cgroup.procs"))
            .args(&line)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        Ok(Self {
            begin: Instant::now(),
            proxy: KilledOnDrop(command.spawn()?),
            log,
            _brain,
            cgroup,
            services,
            endpoints,
            changes: 0,
            server,
            listener,
            _netns_guard,
            _cgroup_guard,
            _node: node,
            _pods: pods,
            sandbox,
        })
    }

    /// Measures a start and so many changes.
    pub(crate) fn measure(&mut self, changes: usize, figures: &mut SizeFigures) -> Result<()> {
        let changing: SocketAddr = (objects::cluster_ip(0), 80).into();
        let last = (objects::cluster_ip(self.services - 1), 80).into();
        self.wait_until("is not served", Duration::from_millis(1), || {
            is_served(changing) && is_served(last)
        })?;
        let cold_start_s = self.begin.elapsed().as_secs_f64();
        figures.start =
            Some(Start { cold_start_s, rss_mb: self.resident_mb()?, cpu_start_s: self.cpu_seconds()? });
        wait_until_idle(MAX_SETTLE_TIME, || self.cpu_seconds())?;
        figures.change = Some(self.measure_changes(changing, changes)?);
        Ok(())
    }

    fn measure_changes(&mut self, address: SocketAddr, changes: usize) -> Result<Change> {
        let (mut times, before, begin) = (Vec::new(), self.cpu_seconds()?, Instant::now());
        while times.len() < changes && (times.len() < MIN_CHANGES || begin.elapsed() < CHANGES_TIME) {
            self.changes += 1;
            let changed = Instant::now();
            let expected = set_changing(&self.server, CHANGING, self.changes);
            let listener = self.listener.try_clone()?;
            self.wait_until("does not show a change", POLL_INTERVAL, || {
                reached(&listener, address) == Some(expected)
            })?;
            times.push(milliseconds(changed.elapsed()));
            thread::sleep(CHANGE_INTERVAL);
        }
        let n = times.len();
        let cpu_ms_per_change = (self.cpu_seconds()? - before) * 1e3 / n as f64;
        let at = percentiles(times);
        let visible_ms = Spread { n, min: at(0), p50: at(50), p95: at(95), p99: Some(at(99)), max: at(100) };
        Ok(Change { visible_ms, cpu_ms_per_change })
    }

    /// Connects through Services and straight to endpoints, in turn.
    fn measure_connects(&self) -> Result<Connect> {
        let endpoints = self.endpoints;
        let mut rng = Rng::with_seed(1);
        let mut times = [const { Vec::new() }; 4];
        for round in 0..ROUNDS {
            let random = (0..CONNECTS).map(|_| rng.u32(1..self.services)).collect::<Vec<_>>();
            let direct = |n: u32| SocketAddr::from((objects::address(n * endpoints), TARGET_PORT));
            let through = |n: u32| SocketAddr::from((objects::cluster_ip(n), 80));
            // A socket belongs to the cgroup in which it was made.
            let bare = {
                let _outside = self.sandbox.enter_root_cgroup()?;
                sockets(2 * CONNECTS)?
            };
            let mut bare = bare.into_iter();
            let mut own = sockets(2 * CONNECTS)?.into_iter();
            let mut kinds = [0, 1, 2, 3];
            kinds.rotate_left(round % 4);
            let mut round_times = [const { Vec::new() }; 4];
            for n in random {
                for kind in kinds {
                    let (socket, address) = match kind {
                        0 => (bare.next(), direct(1)),
                        1 => (own.next(), through(1)),
                        2 => (bare.next(), direct(n)),
                        _ => (own.next(), through(n)),
                    };
                    let socket = socket.context("there are enough sockets")?;
                    round_times[kind].push(self.connect_and_close(socket, address)?);
                }
            }
            for (all, round) in times.iter_mut().zip(round_times) {
                all.push(round);
            }
        }
        let pair = |[bare, vip]: [&[Vec<f64>]; 2]| {
            let medians = |it: &[Vec<f64>]| it.iter().cloned().map(median).collect::<Vec<_>>();
            let ratios = medians(vip).iter().zip(medians(bare)).map(|(vip, bare)| vip / bare).collect();
            Pair { bare: quantiles(bare, None), vip: quantiles(vip, Some(median(ratios))) }
        };
        let [bare, vip, random_bare, random_vip] = &times;
        Ok(Connect { tcp: pair([bare, vip]), random: pair([random_bare, random_vip]) })
    }

    /// In nanoseconds.
    fn connect_and_close(&self, socket: Socket, address: SocketAddr) -> Result<f64> {
        let begin = Instant::now();
        socket.connect(&address.into()).with_context(|| format!("connect to {address}"))?;
        let mut took = begin.elapsed();
        // Without TIME_WAIT, which would exhaust the ports.
        socket.set_linger(Some(Duration::ZERO))?;
        let begin = Instant::now();
        drop(socket);
        took += begin.elapsed();
        while self.listener.accept().is_ok() {}
        Ok(took.as_nanos() as f64)
    }

    /// Polls a condition; the error has the end of the proxy's log.
    fn wait_until(
        &mut self,
        failure: &str,
        interval: Duration,
        mut condition: impl FnMut() -> bool,
    ) -> Result<()> {
        let begin = Instant::now();
        while !condition() {
            while self.listener.accept().is_ok() {}
            let ended = self.proxy.0.try_wait()?;
            if let Some(status) = ended {
                bail!("it ended: {status}\n{}", self.log_end());
            }
            ensure!(begin.elapsed() < TIMEOUT, "{failure} after {} s\n{}", TIMEOUT.as_secs(), self.log_end());
            thread::sleep(interval);
        }
        Ok(())
    }

    fn log_end(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        match lines[lines.len().saturating_sub(10)..].join("\n") {
            it if it.is_empty() => "it wrote nothing".into(),
            it => format!("its last output:\n{it}"),
        }
    }

    /// The CPU time of all its processes, past ones included.
    fn cpu_seconds(&self) -> Result<f64> {
        let stat = fs::read_to_string(self.cgroup.join("cpu.stat"))?;
        let microseconds = stat.lines().find_map(|it| it.strip_prefix("usage_usec ")?.parse::<f64>().ok());
        Ok(microseconds.context("cpu.stat has no usage_usec")? / 1e6)
    }

    /// The resident memory of all its processes.
    fn resident_mb(&self) -> Result<f64> {
        let processes = fs::read_to_string(self.cgroup.join("cgroup.procs"))?;
        // A process may have ended meanwhile.
        let of = |process: &str| memory_mb(process.parse().ok()?, "VmRSS").ok();
        Ok(processes.lines().filter_map(of).sum())
    }
}

/// Waits until a proxy that has used so many seconds of a processor is idle; false if it is not within `limit`.
pub(crate) fn wait_until_idle(limit: Duration, cpu_seconds: impl Fn() -> Result<f64>) -> Result<bool> {
    let (begin, mut before) = (Instant::now(), cpu_seconds()?);
    while begin.elapsed() < limit {
        thread::sleep(IDLE_TIME);
        let now = cpu_seconds()?;
        if now - before < IDLE_SHARE * IDLE_TIME.as_secs_f64() {
            return Ok(true);
        }
        before = now;
    }
    Ok(false)
}

/// Sets the endpoint of the changing Service, at one of these addresses in turn; returns its address.
pub(crate) fn set_changing(server: &ApiServer, addresses: [Ipv4Addr; 2], changes: u32) -> IpAddr {
    let address = addresses[changes as usize % 2];
    let endpoint = objects::endpoint(0, changes, &address.to_string(), 2);
    server.set(objects::slice(0, vec![endpoint]));
    address.into()
}

/// Starts the brain of a backend, outside of the backend's cgroup, and waits until it has the cluster's state.
fn start_brain(binary: &Path, sandbox: &Sandbox, server: &ApiServer) -> Result<Agent> {
    let command = AgentCommand::new(binary)
        .args(["brain", "--source=kube"])
        .arg(format!("--kube-api-server={}", server.url()))
        .arg(format!("--listen={}", brain_socket(sandbox)))
        .env(VERBOSE, "0")
        .node("n1");
    let mut brain = command.start(sandbox)?;
    let socket = sandbox.files().join("proxy.sock");
    brain.wait_until(TIMEOUT, || socket.exists())?;
    wait_until_idle(MAX_SETTLE_TIME, || cpu_seconds(brain.pid()))?;
    Ok(brain)
}

pub(crate) fn is_served(address: SocketAddr) -> bool {
    TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).is_ok_and(|it| reset_on_close(&it).is_ok())
}

/// The endpoint that a connect reaches: the address at which it is accepted.
pub(crate) fn reached(listener: &TcpListener, address: SocketAddr) -> Option<IpAddr> {
    while listener.accept().is_ok() {}
    let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).ok()?;
    reset_on_close(&stream).ok()?;
    // A proxy of sockets connects to the endpoint after the client has connected to it.
    let begin = Instant::now();
    let accepted = loop {
        match listener.accept() {
            Ok((it, _)) => break it,
            Err(_) if begin.elapsed() < CONNECT_TIMEOUT => thread::sleep(POLL_INTERVAL),
            Err(_) => return None,
        }
    };
    reset_on_close(&accepted).ok()?;
    Some(accepted.local_addr().ok()?.ip())
}

fn sockets(count: usize) -> Result<Vec<Socket>> {
    (0..count).map(|_| Ok(Socket::new(Domain::IPV4, Type::STREAM, None)?)).collect()
}

fn quantiles(rounds: &[Vec<f64>], over_bare: Option<f64>) -> Quantiles {
    let all = rounds.concat();
    let n = all.len();
    let at = percentiles(all);
    Quantiles { n, p50: at(50), p90: at(90), p99: at(99), over_bare }
}
