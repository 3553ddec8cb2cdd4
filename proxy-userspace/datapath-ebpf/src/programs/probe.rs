//! Probes the hooks: connects and sends as any program would, to addresses reserved for it, and sees what the hooks do.
//!
//! Invariant: a hook fails only if traffic passed it untranslated that also gets through without it.
//! A firewall on the loopback interface, or a kernel without IPv6, proves nothing about the hooks.

use std::{
    fs, io, iter,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use datapath::{HookBehavior, ProbeResult};
use proxy_common::probe::{ADDRESS4, ADDRESS6};
use socket2::{Domain, Socket, Type};
use tokio::{sync::mpsc, task::spawn_blocking, time::sleep};

use crate::host::cgroup::Cgroup;

/// How long one step may take; it takes microseconds.
const STEP_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a child process may take for all steps.
const CHILD_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the hooks are probed.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// The subcommand with which this binary runs as the child process of a probe.
pub const SUBCOMMAND: &str = "probe";

/// Why hooks that work may show nothing.
const NO_ROOM: &str = "no room, because the sockets of its network namespace have used up their share; raise --socket-slots and \
                       --udp-addresses, or find what leaks sockets";

/// The hooks that are probed, by family: connect, getpeername, sendmsg, recvmsg.
const HOOKS: [[&str; 4]; 2] = [
    ["connect4", "getpeername4", "sendmsg4", "recvmsg4"],
    ["connect6", "getpeername6", "sendmsg6", "recvmsg6"],
];

/// Probes the hooks periodically in the background, so that a probe which blocks delays nothing else.
pub struct Prober(mpsc::Receiver<Vec<ProbeResult>>);

impl Prober {
    /// Starts. Must be called within a tokio runtime.
    pub fn start(cgroup: PathBuf) -> Self {
        let (sender, results) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let cgroup = cgroup.clone();
                let probed = spawn_blocking(move || Cgroup::open(Some(&cgroup)).map(|it| probe(&it))).await;
                // A cgroup that is gone is reported by the next attach.
                if let Ok(Ok(results)) = probed
                    && sender.send(results).await.is_err()
                {
                    return;
                }
                sleep(PROBE_INTERVAL).await;
            }
        });
        Self(results)
    }

    /// Waits for the results of the next probe.
    pub async fn next(&mut self) -> Vec<ProbeResult> {
        match self.0.recv().await {
            Some(results) => results,
            // The task ends only after this value is dropped.
            None => std::future::pending().await,
        }
    }
}

/// Probes every hook from inside a cgroup: in this process if it belongs to the cgroup, else in a child that is moved there.
///
/// Takes less than a millisecond if the hooks work, and some seconds at most.
pub(crate) fn probe(cgroup: &Cgroup) -> Vec<ProbeResult> {
    if cgroup.has_own_process() {
        return probe_in_process();
    }
    probe_in_child(&cgroup.path).unwrap_or_else(|error| {
        let why = format!("no process can be started in {}: {error}", cgroup.path.display());
        results(iter::repeat(HookBehavior::Unknown(why)))
    })
}

/// The results of all hooks, in order.
fn results(behaviors: impl IntoIterator<Item = HookBehavior>) -> Vec<ProbeResult> {
    let hooks = HOOKS.as_flattened().iter().zip(behaviors);
    hooks.map(|(hook, behavior)| ProbeResult { hook, behavior }).collect()
}

fn probe_in_process() -> Vec<ProbeResult> {
    let families = [
        (Ipv4Addr::LOCALHOST.into(), IpAddr::V4(ADDRESS4.into())),
        (Ipv6Addr::LOCALHOST.into(), IpAddr::V6(ADDRESS6.into())),
    ];
    results(families.into_iter().flat_map(|(loopback, reserved)| {
        let tcp = probe_tcp(loopback, reserved).unwrap_or_else(|error| Probed::unknown(&error));
        let udp = probe_udp(loopback, reserved).unwrap_or_else(|error| Probed::unknown(&error));
        let ([connect, getpeername], [sendmsg, recvmsg]) = (tcp.behaviors, udp.behaviors);
        // A socket that shows the endpoint may have another reason, but not if datagrams are denied.
        if tcp.may_lack_room && udp.may_lack_room {
            let unknown = || HookBehavior::Unknown(NO_ROOM.into());
            return [connect, unknown(), unknown(), unknown()];
        }
        [connect, getpeername, sendmsg, recvmsg]
    }))
}

/// What the probe of a protocol has found.
struct Probed {
    behaviors: [HookBehavior; 2],
    /// Whether it looks as if there were no room for the translations of its sockets, which is no fault of the hooks.
    may_lack_room: bool,
}

impl Probed {
    fn new(behaviors: [HookBehavior; 2]) -> Self {
        Self { behaviors, may_lack_room: false }
    }

    fn unknown(error: &io::Error) -> Self {
        Self::new([HookBehavior::Unknown(error.to_string()), HookBehavior::Unknown(error.to_string())])
    }
}

/// Connects to a listener directly, then through the reserved address.
fn probe_tcp(loopback: IpAddr, reserved: IpAddr) -> io::Result<Probed> {
    let listener = TcpListener::bind((loopback, 0))?;
    let server = listener.local_addr()?;
    let port = server.port();
    socket(reserved, Type::STREAM)?.connect_timeout(&server.into(), STEP_TIMEOUT)?;
    let to = SocketAddr::new(reserved, port);
    let client = socket(reserved, Type::STREAM)?;
    if let Err(error) = client.connect_timeout(&to.into(), STEP_TIMEOUT) {
        let how = format!("a connect to {to} was not redirected to {loopback}: {error}");
        return Ok(Probed::new([HookBehavior::Fails(how), HookBehavior::Unknown("no connection".into())]));
    }
    let peer = client.peer_addr()?.as_socket();
    let getpeername = match peer {
        Some(peer) if peer == to => HookBehavior::Ok,
        peer => {
            let peer = peer.map_or_else(|| "no address".into(), |it| it.to_string());
            HookBehavior::Fails(format!("the peer of a socket that connected to {to} is reported as {peer}"))
        }
    };
    Ok(Probed { behaviors: [HookBehavior::Ok, getpeername], may_lack_room: peer == Some(server) })
}

/// Sends a datagram to a server directly, then through the reserved address, and receives a reply.
fn probe_udp(loopback: IpAddr, reserved: IpAddr) -> io::Result<Probed> {
    let server = UdpSocket::bind((loopback, 0))?;
    server.set_read_timeout(Some(STEP_TIMEOUT))?;
    let port = server.local_addr()?.port();
    socket(reserved, Type::DGRAM)?.send_to(b"?", &SocketAddr::new(loopback, port).into())?;
    server.recv_from(&mut [0; 8])?;
    let to = SocketAddr::new(reserved, port);
    let client = UdpSocket::from(socket(reserved, Type::DGRAM)?);
    client.set_read_timeout(Some(STEP_TIMEOUT))?;
    let from = match client.send_to(b"?", to).and_then(|_| server.recv_from(&mut [0; 8])) {
        Ok((_, from)) => from,
        // A hook has run, and denied it; before Linux 5.18 it cannot choose the error.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EPERM)) => {
            let unknown = || HookBehavior::Unknown(format!("{error}: perhaps {NO_ROOM}"));
            return Ok(Probed { behaviors: [unknown(), unknown()], may_lack_room: true });
        }
        Err(error) => {
            let how = format!("a datagram to {to} was not redirected to {loopback}: {error}");
            let behaviors = [HookBehavior::Fails(how), HookBehavior::Unknown("no datagram was sent".into())];
            return Ok(Probed::new(behaviors));
        }
    };
    server.send_to(b"!", from)?;
    let (_, source) = client.recv_from(&mut [0; 8])?;
    let recvmsg = if source == to {
        HookBehavior::Ok
    } else {
        HookBehavior::Fails(format!("the reply to a datagram to {to} is reported to come from {source}"))
    };
    Ok(Probed::new([HookBehavior::Ok, recvmsg]))
}

/// A socket whose traffic cannot leave this machine, and that leaves no port in TIME_WAIT.
fn socket(address: IpAddr, kind: Type) -> io::Result<Socket> {
    let domain = if address.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, kind, None)?;
    socket.bind_device(Some(b"lo"))?;
    if kind == Type::STREAM {
        socket.set_linger(Some(Duration::ZERO))?;
    }
    Ok(socket)
}

/// Probes from a child process, which enters the cgroup before it begins.
fn probe_in_child(cgroup: &Path) -> io::Result<Vec<ProbeResult>> {
    let mut child = Command::new("/proc/self/exe")
        .arg(SUBCOMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let output = fs::write(cgroup.join("cgroup.procs"), child.id().to_string()).and_then(|()| {
        // It begins at the end of its input.
        drop(child.stdin.take());
        child.stdout.take().map_or_else(|| Ok(String::new()), |it| read_to_end_within(it, CHILD_TIMEOUT))
    });
    // It is finished or hangs; in either case it must not stay behind.
    let _ = child.kill();
    child.wait()?;
    output.map(|it| parse(&it))
}

fn read_to_end_within(from: impl io::Read + Send + 'static, timeout: Duration) -> io::Result<String> {
    let (sender, read) = std::sync::mpsc::channel();
    // It ends with the child, which is killed after the timeout.
    thread::spawn(move || sender.send(io::read_to_string(from)));
    read.recv_timeout(timeout).unwrap_or_else(|_| {
        let error = format!("no answer within {timeout:?}; the cgroup may be frozen");
        Err(io::Error::new(io::ErrorKind::TimedOut, error))
    })
}

/// What the child process does: waits for the end of its input, probes the hooks, writes a line per hook.
///
/// # Errors
///
/// If the output cannot be written.
pub fn child_main(mut input: impl io::Read, mut output: impl io::Write) -> io::Result<()> {
    io::copy(&mut input, &mut io::sink())?;
    for ProbeResult { hook, behavior } in probe_in_process() {
        match behavior {
            HookBehavior::Ok => writeln!(output, "{hook}\tok\t"),
            HookBehavior::Fails(how) => writeln!(output, "{hook}\tfails\t{how}"),
            HookBehavior::Unknown(why) => writeln!(output, "{hook}\tunknown\t{why}"),
        }?;
    }
    output.flush()
}

fn parse(text: &str) -> Vec<ProbeResult> {
    results(HOOKS.as_flattened().iter().map(|hook| {
        let line = text.lines().find_map(|it| it.strip_prefix(hook)?.strip_prefix('\t')?.split_once('\t'));
        match line {
            Some(("ok", _)) => HookBehavior::Ok,
            Some(("fails", how)) => HookBehavior::Fails(how.to_owned()),
            Some((_, why)) => HookBehavior::Unknown(why.to_owned()),
            None => HookBehavior::Unknown("the child process did not report it".into()),
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_does_not_answer_times_out() {
        let (reader, _child) = io::pipe().unwrap();
        let error = read_to_end_within(reader, Duration::from_millis(10)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(read_to_end_within(&b"connect4\tok"[..], CHILD_TIMEOUT).unwrap(), "connect4\tok");
    }

    /// No program translates this test's sockets.
    #[test]
    fn a_child_reports_that_no_hook_works_without_programs_and_its_report_is_parsed() {
        let mut report = Vec::new();
        child_main(io::empty(), &mut report).unwrap();
        let report = String::from_utf8(report).unwrap();
        let results = parse(&report);
        for hook in ["connect4", "sendmsg4"] {
            let found = &results.iter().find(|it| it.hook == hook).unwrap().behavior;
            assert!(matches!(found, HookBehavior::Fails(how) if how.contains("127.107")), "{results:?}");
        }
        assert!(results.iter().all(|it| it.behavior != HookBehavior::Ok), "{results:?}");
        let results = parse("connect4\tok\t\nconnect6\tunknown\tno IPv6");
        assert_eq!(results[0].behavior, HookBehavior::Ok);
        assert_eq!(results[4].behavior, HookBehavior::Unknown("no IPv6".into()));
        assert!(matches!(results[1].behavior, HookBehavior::Unknown(_)));
    }
}
