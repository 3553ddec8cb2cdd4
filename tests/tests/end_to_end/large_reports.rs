//! The memory that reports take, whatever is served.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    os::unix::net::UnixStream,
    process::{Child, Command, Stdio},
    time::Duration,
};

use build_tools::command::KilledOnDrop;
use tests::{
    Build, Service, TIMEOUT, TestNode, agent, eventually, http::METRICS_PORT, manifest, repetitions,
};

const ENDPOINTS: usize = 10;
/// The most that a report may take in a process, in kB.
const MAX_GROWTH: u64 = 20 << 10;

fn list(services: usize) -> String {
    let address =
        |first, n: usize| Ipv4Addr::from_bits(Ipv4Addr::from_octets(first).to_bits() + n as u32).into();
    let service = |n| {
        let service = Service::new(&format!("service-{n}"), &[address([10, 97, 0, 0], n)]);
        (0..ENDPOINTS).fold(service.port("", "TCP", 80, 8080), |service, it| {
            let ip = address([10, 128, 0, 0], n * ENDPOINTS + it);
            service.endpoint_on(&format!("n{it}"), &format!("service-{n}-{it}"), &[ip])
        })
    };
    manifest::list(&(0..services).map(service).collect::<Vec<_>>())
}

/// What a report has, and the most memory that the command had while its output was read, without the pages of its binary.
fn read(child: &mut Child) -> (usize, u64) {
    let (mut size, mut peak, mut chunk) = (0, 0, vec![0; 256 << 10]);
    let mut output = child.stdout.take().unwrap();
    loop {
        let length = output.read(&mut chunk).unwrap();
        if let [Ok(own), Ok(file)] = ["VmHWM", "RssFile"].map(|it| agent::memory_kb(child.id(), it)) {
            peak = own.saturating_sub(file).max(peak);
        }
        if length == 0 {
            assert!(child.wait().unwrap().success());
            return (size, peak);
        }
        size += length;
    }
}

/// The most memory of a process of this program that does nothing, without the pages of its binary.
fn idle_peak() -> u64 {
    let child = KilledOnDrop(spawn(Command::new(Build::Product.binary()).arg("wait")));
    // It has started.
    std::thread::sleep(tests::scaled(Duration::from_millis(500)));
    agent::memory_kb(child.0.id(), "RssAnon").unwrap_or_default()
}

fn spawn(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// The most memory of the process while something is read.
fn process_peak<T>(node: &TestNode, read: impl FnOnce() -> T) -> (T, u64) {
    // Begins a new peak.
    fs::write(format!("/proc/{}/clear_refs", node.agent().pid()), "5").unwrap();
    let before = node.agent().memory_kb("VmRSS").unwrap();
    let result = read();
    (result, node.agent().memory_kb("VmHWM").unwrap().saturating_sub(before))
}

#[test]
fn no_report_takes_more_than_20_mb_in_either_process() {
    let Some(mut node) = TestNode::or_skip() else { return };
    let services = repetitions(10_000);
    node.write_file("all.json", &list(3));
    node.start(&[]);
    node.wait_until_ready();
    node.write_file("all.json", &list(services));
    let served = || tests::http::metric("kube_proxy_ebpf_services") == Some(services as f64);
    assert!(eventually(3 * TIMEOUT, served), "{}", node.log());
    let idle = idle_peak();
    let mut growth = Vec::new();
    for (name, arguments) in [
        ("status", &["-o", "json"][..]),
        ("status", &[]),
        ("dump", &[]),
        ("support-bundle", &["--packets=off", "-"]),
        ("support-bundle", &["--packets=off", "--anonymize", "-"]),
        ("top", &["--once"]),
    ] {
        let mut command = node.cli(name);
        let ((size, peak), grown) = process_peak(&node, || read(&mut spawn(command.args(arguments))));
        let own = peak.saturating_sub(idle);
        println!("{name} {arguments:?}: {size} bytes, {own} kB in the command, {grown} kB in the process");
        growth.extend([own, grown]);
    }
    for path in ["/state", "/status", "/metrics"] {
        let (size, grown) = process_peak(&node, || {
            let mut stream = UnixStream::connect(agent::status_socket(node.sandbox())).unwrap();
            write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
            io::copy(&mut stream, &mut io::sink()).unwrap()
        });
        println!("{path}: {size} bytes, {grown} kB in the process");
        growth.push(grown);
    }
    assert!(growth.iter().all(|it| *it < MAX_GROWTH), "{growth:?}");
}

/// Asks for the state and for the metrics, and reads neither.
pub(super) fn unread(node: &TestNode) -> (UnixStream, TcpStream) {
    let mut reader = UnixStream::connect(agent::status_socket(node.sandbox())).unwrap();
    reader.write_all(b"GET /state HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut scraper = TcpStream::connect((Ipv4Addr::LOCALHOST, METRICS_PORT)).unwrap();
    scraper.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    (reader, scraper)
}

#[test]
fn readers_that_never_read_cost_no_page() {
    let Some(mut node) = TestNode::or_skip() else { return };
    node.write_file("all.json", &list(repetitions(5_000)));
    node.start(&[]);
    node.wait_until_ready();
    let ((readers, page), grown) = process_peak(&node, || {
        let readers: Vec<_> = (0..30).map(|_| unread(&node)).collect();
        // Others are served.
        let page = node.status_page("/state").unwrap().body;
        assert!(page.contains("service-0"));
        (readers, page.len() as u64 >> 10)
    });
    let pages = readers.len() as u64 * page;
    println!("{} readers that never read, and as many scrapers: {grown} kB of {pages}", readers.len());
    // The heap, which the start has just filled, grows by up to this much for other reasons.
    assert!(grown < MAX_GROWTH + pages / 10, "{grown} kB, and the pages have {pages}");
}
