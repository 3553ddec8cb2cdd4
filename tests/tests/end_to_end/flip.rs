//! An update takes effect for all ports, Services and families atomically.

use std::{
    io::{IoSlice, IoSliceMut, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, sendmsg, setsockopt, sockopt,
};
use tests::{
    Build, NODE, REQUEST_TIMEOUT, Service, TIMEOUT, TestNode, agent::SLOW_PROGRAMS, eventually, manifest,
    repetitions, scaled, udp_socket,
};

const STATES: usize = 2000;
/// The maximum number of backends of a state; no two states have a backend in common.
const MAX_BACKENDS: u16 = 4;

const A4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
const B4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 2);
/// An address of the node.
const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const A6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 1);

fn backend4(state: u16, n: u16) -> IpAddr {
    let [high, low] = (state * MAX_BACKENDS + n).to_be_bytes();
    Ipv4Addr::new(10, 244, high, low).into()
}

fn backend6(state: u16, n: u16) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, state * MAX_BACKENDS + n).into()
}

/// The state to which a backend belongs.
fn state_of(backend: IpAddr) -> u16 {
    let n = match backend {
        IpAddr::V4(it) => u16::from_be_bytes([it.octets()[2], it.octets()[3]]),
        IpAddr::V6(it) => it
            .to_ipv4_mapped()
            .map_or(it.segments()[7], |it| u16::from_be_bytes([it.octets()[2], it.octets()[3]])),
    };
    n / MAX_BACKENDS
}

/// Other frontends of a state's first Service over UDP, which the states before and after it do not have: an external IP
/// in a network of its own, and a node port.
fn other_frontends(state: u16) -> [SocketAddr; 2] {
    let odd = state % 2;
    [(Ipv4Addr::new(198, 18 + odd as u8, 0, 1), 80).into(), (OWN, 30_080 + odd).into()]
}

/// Two Services that change together; the number of their backends differs from state to state.
fn services(state: u16) -> Vec<Service> {
    let [external, node_port] = other_frontends(state);
    let mut a = Service::new("a", &[A4.into(), A6.into()])
        .external_ips(&[external.ip()])
        .port("one", "TCP", 80, 8080)
        .port("two", "TCP", 81, 8080)
        .port("one-udp", "UDP", 80, 8080)
        .node_port(node_port.port())
        .port("two-udp", "UDP", 81, 8080);
    let mut b = Service::new("b", &[B4.into()]).port("udp", "UDP", 80, 8080).port("tcp", "TCP", 80, 8080);
    for n in 0..if state.is_multiple_of(2) { MAX_BACKENDS } else { 1 } {
        a = a.endpoint(&format!("a-{state}-{n}"), &[backend4(state, n), backend6(state, n)]);
        b = b.endpoint(&format!("b-{state}-{n}"), &[backend4(state, n)]);
    }
    vec![a, b]
}

/// The backend of a connect to `service`: a socket that is connected to a local address has that address as its source.
fn connect_udp(service: SocketAddr) -> std::io::Result<IpAddr> {
    loop {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(service)?;
        let source = socket.local_addr()?.ip();
        // A socket that was terminated, because its endpoint has been removed meanwhile, has none.
        if !source.is_unspecified() {
            return Ok(source);
        }
    }
}

/// Like [`connect_udp`]; an error if another frontend of the backend's state is redirected to a different state meanwhile.
fn connect_other_frontends(service: SocketAddr) -> std::io::Result<IpAddr> {
    let backend = connect_udp(service)?;
    let state = state_of(backend);
    for frontend in other_frontends(state) {
        let found = connect_udp(frontend).map(state_of);
        let is_still_active = state_of(connect_udp(service)?) == state;
        if is_still_active && !found.as_ref().is_ok_and(|it| *it == state) {
            return Err(std::io::Error::other(format!(
                "{frontend} is redirected to {found:?} in state {state}"
            )));
        }
    }
    Ok(backend)
}

/// The backend that a TCP connect reaches: the server sends the address at which it accepted.
fn connect_tcp(service: SocketAddr) -> std::io::Result<IpAddr> {
    let failed = |what: &str, error: std::io::Error| std::io::Error::other(format!("{what}: {error}"));
    let mut stream = TcpStream::connect_timeout(&service, scaled(REQUEST_TIMEOUT))
        .map_err(|error| failed("connecting", error))?;
    let mut address = [0; 16];
    stream.read_exact(&mut address).map_err(|error| failed("reading", error))?;
    Ok(Ipv6Addr::from(address).to_canonical())
}

/// The backend of a request over an unconnected socket: the server replies with the address at which it received it.
fn exchange(socket: &UdpSocket, service: SocketAddr) -> std::io::Result<IpAddr> {
    socket.send_to(b"where?", service)?;
    let mut address = [0; 4];
    let (_, from) = socket.recv_from(&mut address)?;
    if from != service {
        return Err(std::io::Error::other(format!("the reply came from {from}")));
    }
    Ok(Ipv4Addr::from(address).into())
}

/// Replies to datagrams with, and from, the address they were sent to.
fn serve_datagrams() {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 8080)).unwrap();
    setsockopt(&socket, sockopt::Ipv4PacketInfo, &true).unwrap();
    thread::spawn(move || {
        let mut request = [0; 16];
        let mut space = nix::cmsg_space!(nix::libc::in_pktinfo);
        loop {
            let mut buffers = [IoSliceMut::new(&mut request)];
            let received =
                recvmsg::<SockaddrIn>(socket.as_raw_fd(), &mut buffers, Some(&mut space), MsgFlags::empty())
                    .unwrap();
            let to = received.cmsgs().unwrap().find_map(|it| match it {
                ControlMessageOwned::Ipv4PacketInfo(info) => Some(info.ipi_addr),
                _ => None,
            });
            let (to, from) = (to.unwrap(), received.address.unwrap());
            let reply = to.s_addr.to_ne_bytes();
            let source = nix::libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: to, ipi_addr: to };
            sendmsg(
                socket.as_raw_fd(),
                &[IoSlice::new(&reply)],
                &[ControlMessage::Ipv4PacketInfo(&source)],
                MsgFlags::empty(),
                Some(&from),
            )
            .unwrap();
        }
    });
}

fn serve() {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 8080)).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let result = stream.and_then(|mut it| {
                let IpAddr::V6(address) = it.local_addr()?.ip() else { unreachable!("a v6 listener") };
                it.write_all(&address.octets())?;
                // Let the client close first: a connection closed by this side stays in TIME_WAIT, and where the kernel has no
                // room for so many, it replies to a late acknowledgment with a reset.
                it.read(&mut [0])
            });
            // The client may have closed the connection.
            let _ = result;
        }
    });
}

/// Connects to `services` in turn and counts. A connect may see the state before or after a flip, but never an earlier one.
fn start_reader(
    stop: &Arc<AtomicBool>,
    failures: &Arc<std::sync::Mutex<Vec<String>>>,
    services: Vec<SocketAddr>,
    connect: impl Fn(SocketAddr) -> std::io::Result<IpAddr> + Send + 'static,
) -> thread::JoinHandle<(usize, usize)> {
    let (stop, failures) = (Arc::clone(stop), Arc::clone(failures));
    thread::spawn(move || {
        let (mut connects, mut states, mut newest) = (0, 0, 0);
        while !stop.load(Ordering::Relaxed) {
            for service in &services {
                connects += 1;
                let failure = match connect(*service).map(state_of) {
                    Ok(state) if state >= newest => {
                        states += usize::from(state > newest);
                        newest = state;
                        continue;
                    }
                    Ok(state) => format!("{service} is redirected to state {state} after {newest}"),
                    Err(error) => format!("{service} in state {newest}: {error}"),
                };
                failures.lock().unwrap().push(failure);
            }
        }
        (connects, states)
    })
}

#[test]
fn flip_is_atomic_under_load() {
    let Some(mut node) = TestNode::or_skip() else { return };
    serve();
    serve_datagrams();
    node.netns().add_address(OWN.into()).unwrap();
    node.write_file("node.yaml", &manifest::node_with_addresses(NODE, &[OWN.into()]));
    node.write(&services(1));
    let (fault, slow) = SLOW_PROGRAMS;
    node.start_with(&node.command(Build::Failpoints).env(fault, slow));
    let a = SocketAddr::from((A4, 80));

    let stop = Arc::new(AtomicBool::new(false));
    let failures = Arc::default();
    let udp = vec![(A4, 80).into(), (A4, 81).into(), (B4, 80).into()];
    let tcp = vec![(A6, 80).into(), (B4, 80).into(), (A4, 81).into(), (A6, 81).into()];
    let socket = udp_socket(a).unwrap();
    let readers = [
        start_reader(&stop, &failures, udp.clone(), move |service| exchange(&socket, service)),
        start_reader(&stop, &failures, udp.clone(), connect_udp),
        start_reader(&stop, &failures, udp.into_iter().rev().collect(), connect_udp),
        start_reader(&stop, &failures, tcp, connect_tcp),
        start_reader(&stop, &failures, vec![a], connect_other_frontends),
    ];
    let mut active = 0;
    let states = repetitions(STATES);
    for state in 2..=states as u16 {
        node.write(&services(state));
        let seen = eventually(TIMEOUT, || {
            connect_udp(a).is_ok_and(|it| state_of(it) == state) || !failures.lock().unwrap().is_empty()
        });
        assert!(seen, "state {state} did not become active; the agent's log:\n{}", node.log());
        if !failures.lock().unwrap().is_empty() {
            break;
        }
        active += 1;
    }
    stop.store(true, Ordering::Relaxed);
    let counts = readers.map(|it| it.join().unwrap());
    eprintln!("{active} states; connects and states seen, by reader: {counts:?}");
    let failures = failures.lock().unwrap();
    assert!(
        failures.is_empty(),
        "{} connects failed:\n{}",
        failures.len(),
        failures[..failures.len().min(10)].join("\n")
    );
    for (connects, seen) in counts {
        assert!(
            connects > states / 2 && seen > states / 10,
            "a reader hardly ran: {connects} connects, {seen} states"
        );
    }
}
