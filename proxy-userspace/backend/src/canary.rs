//! The canary: a program that uses the hooks as any program would, on addresses that are nobody's, and tells whether they
//! act.
//!
//! The one rule: that a hook does not act is said only of what went past it while the same went through without it.
//! A firewall on the loopback interface, or a kernel without IPv6, proves nothing.

use std::{
    fmt, fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use proxy_common::probe::{ADDRESS4, ADDRESS6};
use socket2::{Domain, Socket, Type};
use tokio::{sync::mpsc, task::spawn_blocking, time::sleep};

use crate::ebpf::Cgroup;

/// How long one step may take; it takes microseconds.
const LIMIT: Duration = Duration::from_secs(1);
/// How long a child may take for all of them, which is as long as all its steps may.
const CHILD_LIMIT: Duration = Duration::from_secs(10);
/// How often they are tried.
const PAUSE: Duration = Duration::from_secs(5);
/// What a process is called with to be the canary of another one.
pub const COMMAND: &str = "canary";

/// What is known of a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Its name, as in `connect4`.
    pub hook: &'static str,
    /// Whether it acts.
    pub answer: Answer,
}

/// Whether a hook acts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It does what it should.
    Acts,
    /// What it should have led went past it; how.
    Fails(String),
    /// It could not be tried; why.
    Untold(String),
}

impl fmt::Display for Heard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.answer {
            Answer::Acts => write!(f, "{} acts", self.hook),
            Answer::Fails(how) => write!(f, "{} does not act: {how}", self.hook),
            Answer::Untold(why) => write!(f, "{} cannot be tried: {why}", self.hook),
        }
    }
}

/// The hooks that are tried, by family: connect, getpeername, sendmsg, recvmsg.
const HOOKS: [[&str; 4]; 2] = [
    ["connect4", "getpeername4", "sendmsg4", "recvmsg4"],
    ["connect6", "getpeername6", "sendmsg6", "recvmsg6"],
];

/// Tries the hooks every few seconds, beside everything else: where something is wrong, it takes its time.
pub(crate) struct Trial(mpsc::Receiver<Vec<Heard>>);

impl Trial {
    /// Begins. Must be called within a tokio runtime.
    pub(crate) fn start(cgroup: PathBuf) -> Self {
        let (tell, heard) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let cgroup = cgroup.clone();
                let asked = spawn_blocking(move || Cgroup::open(Some(&cgroup)).map(|it| ask(&it))).await;
                // One that is gone is told of by whoever attaches.
                if let Ok(Ok(heard)) = asked
                    && tell.send(heard).await.is_err()
                {
                    return;
                }
                sleep(PAUSE).await;
            }
        });
        Self(heard)
    }

    /// What was heard, as soon as there is something new.
    pub(crate) async fn heard(&mut self) -> Vec<Heard> {
        match self.0.recv().await {
            Some(heard) => heard,
            // Its task ends only with this value.
            None => std::future::pending().await,
        }
    }
}

/// Tries every hook from inside a cgroup: in this process if it is there, or else in a child that is put there.
///
/// Takes less than a millisecond if all is well, and some seconds at most.
pub(crate) fn ask(cgroup: &Cgroup) -> Vec<Heard> {
    if cgroup.has_own_process() {
        return sing();
    }
    send(cgroup.path()).unwrap_or_else(|error| {
        let why = format!("no process can try it in {}: {error}", cgroup.path().display());
        HOOKS.as_flattened().iter().map(|hook| Heard { hook, answer: Answer::Untold(why.clone()) }).collect()
    })
}

/// Tries every hook from this process.
fn sing() -> Vec<Heard> {
    let families = [
        (Ipv4Addr::LOCALHOST.into(), IpAddr::V4(ADDRESS4.into())),
        (Ipv6Addr::LOCALHOST.into(), IpAddr::V6(ADDRESS6.into())),
    ];
    let tried = families.map(|(loopback, canary)| {
        let [connect, getpeername] = tcp(loopback, canary).unwrap_or_else(|error| untold(&error));
        let [sendmsg, recvmsg] = udp(loopback, canary).unwrap_or_else(|error| untold(&error));
        [connect, getpeername, sendmsg, recvmsg]
    });
    let answers = tried.into_iter().flatten();
    HOOKS.as_flattened().iter().zip(answers).map(|(hook, answer)| Heard { hook, answer }).collect()
}

fn untold(error: &io::Error) -> [Answer; 2] {
    [Answer::Untold(error.to_string()), Answer::Untold(error.to_string())]
}

/// Connects: to the listener itself, and then to it by the canary's address.
fn tcp(loopback: IpAddr, canary: IpAddr) -> io::Result<[Answer; 2]> {
    let listener = TcpListener::bind((loopback, 0))?;
    let port = listener.local_addr()?.port();
    socket(canary, Type::STREAM)?.connect_timeout(&SocketAddr::new(loopback, port).into(), LIMIT)?;
    let to = SocketAddr::new(canary, port);
    let client = socket(canary, Type::STREAM)?;
    if let Err(error) = client.connect_timeout(&to.into(), LIMIT) {
        let how = format!("a connect to {to} was not led to {loopback}: {error}");
        return Ok([Answer::Fails(how), Answer::Untold("nothing is connected".into())]);
    }
    let getpeername = match client.peer_addr()?.as_socket() {
        Some(peer) if peer == to => Answer::Acts,
        peer => {
            Answer::Fails(format!("the peer of a socket that connected to {to} is shown as {}", shown(peer)))
        }
    };
    Ok([Answer::Acts, getpeername])
}

/// Sends: to the server itself, and then to it by the canary's address; and hears the answer.
fn udp(loopback: IpAddr, canary: IpAddr) -> io::Result<[Answer; 2]> {
    let server = UdpSocket::bind((loopback, 0))?;
    server.set_read_timeout(Some(LIMIT))?;
    let port = server.local_addr()?.port();
    socket(canary, Type::DGRAM)?.send_to(b"?", &SocketAddr::new(loopback, port).into())?;
    server.recv_from(&mut [0; 8])?;
    let to = SocketAddr::new(canary, port);
    let client = UdpSocket::from(socket(canary, Type::DGRAM)?);
    client.set_read_timeout(Some(LIMIT))?;
    let arrived = client.send_to(b"?", to).and_then(|_| server.recv_from(&mut [0; 8]));
    let from = match arrived {
        Ok((_, from)) => from,
        Err(error) => {
            let how = format!("a datagram to {to} was not led to {loopback}: {error}");
            return Ok([Answer::Fails(how), Answer::Untold("nothing was sent".into())]);
        }
    };
    server.send_to(b"!", from)?;
    let (_, source) = client.recv_from(&mut [0; 8])?;
    let recvmsg = if source == to {
        Answer::Acts
    } else {
        Answer::Fails(format!("the answer to a datagram to {to} is shown as from {source}"))
    };
    Ok([Answer::Acts, recvmsg])
}

/// A socket that cannot reach further than this machine, and leaves no port behind that waits.
fn socket(address: IpAddr, kind: Type) -> io::Result<Socket> {
    let domain = if address.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, kind, None)?;
    socket.bind_device(Some(b"lo"))?;
    if kind == Type::STREAM {
        socket.set_linger(Some(Duration::ZERO))?;
    }
    Ok(socket)
}

fn shown(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "no address".into(), |it| it.to_string())
}

/// Has a child do it, which is in the cgroup before it begins.
fn send(cgroup: &Path) -> io::Result<Vec<Heard>> {
    let mut child = Command::new("/proc/self/exe")
        .arg(COMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let told = fs::write(cgroup.join("cgroup.procs"), child.id().to_string()).and_then(|()| {
        // It waits for the end of its input.
        drop(child.stdin.take());
        child.stdout.take().map_or_else(|| Ok(String::new()), |it| read_within(it, CHILD_LIMIT))
    });
    // It is done, or it is no use; in either case it must not be left behind.
    let _ = child.kill();
    child.wait()?;
    told.map(|it| parse(&it))
}

/// Reads to the end, which must come in time.
fn read_within(mut from: impl io::Read + AsFd, limit: Duration) -> io::Result<String> {
    let end = Instant::now() + limit;
    let mut read = Vec::new();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).map_err(io::Error::other)?;
        if poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], timeout)? == 0 {
            let error = format!("it has not answered for {limit:?}; see whether the cgroup is frozen");
            return Err(io::Error::new(io::ErrorKind::TimedOut, error));
        }
        let mut buffer = [0; 4096];
        match from.read(&mut buffer)? {
            0 => return String::from_utf8(read).map_err(io::Error::other),
            length => read.extend_from_slice(&buffer[..length]),
        }
    }
}

/// What the child does: waits until it is told to begin, and writes what it has heard.
///
/// # Errors
///
/// If nobody is there to hear it.
pub fn obey(mut input: impl io::Read, mut output: impl io::Write) -> io::Result<()> {
    io::copy(&mut input, &mut io::sink())?;
    for Heard { hook, answer } in sing() {
        match answer {
            Answer::Acts => writeln!(output, "{hook}\tacts\t"),
            Answer::Fails(how) => writeln!(output, "{hook}\tfails\t{how}"),
            Answer::Untold(why) => writeln!(output, "{hook}\tuntold\t{why}"),
        }?;
    }
    output.flush()
}

fn parse(text: &str) -> Vec<Heard> {
    let hooks = HOOKS.as_flattened().iter();
    let heard = hooks.map(|hook| {
        let line = text.lines().find_map(|it| it.strip_prefix(hook)?.strip_prefix('\t')?.split_once('\t'));
        let answer = match line {
            Some(("acts", _)) => Answer::Acts,
            Some(("fails", how)) => Answer::Fails(how.to_owned()),
            Some((_, why)) => Answer::Untold(why.to_owned()),
            None => Answer::Untold("the child said nothing of it".into()),
        };
        Heard { hook, answer }
    });
    heard.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nobody leads this test's sockets.
    #[test]
    fn without_programs_every_hook_that_can_be_tried_fails() {
        let heard = sing();
        let v4 = |hook: &str| heard.iter().find(|it| it.hook == hook).unwrap().answer.clone();
        assert!(matches!(v4("connect4"), Answer::Fails(_)), "{heard:?}");
        assert!(matches!(v4("sendmsg4"), Answer::Fails(_)), "{heard:?}");
        assert!(heard.iter().all(|it| it.answer != Answer::Acts), "{heard:?}");
    }

    #[test]
    fn who_does_not_answer_is_not_waited_for() {
        let (answers, mut child) = io::pipe().unwrap();
        io::Write::write_all(&mut child, b"connect4").unwrap();
        let error = read_within(&answers, Duration::from_millis(10)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        io::Write::write_all(&mut child, b"\tacts").unwrap();
        drop(child);
        assert_eq!(read_within(&answers, CHILD_LIMIT).unwrap(), "\tacts");
    }

    #[test]
    fn what_a_child_says_is_understood() {
        let mut said = Vec::new();
        obey(io::empty(), &mut said).unwrap();
        let said = String::from_utf8(said).unwrap();
        assert!(
            parse(&said).iter().any(|it| matches!(&it.answer, Answer::Fails(how) if how.contains("127.107")))
        );
        let heard = parse("connect4\tacts\t\nconnect6\tuntold\tno IPv6");
        assert_eq!(heard[0].answer, Answer::Acts);
        assert_eq!(heard[4].answer, Answer::Untold("no IPv6".into()));
        assert!(matches!(heard[1].answer, Answer::Untold(_)));
    }
}
