//! Two network namespaces: the node, and everything else. The probe sends and receives every packet of everything else.
//!
//! Both ends of the veth pair have one address and no ARP: every packet is for the other side, and no neighbor is looked up.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd as _,
    process::{self, Command},
    thread,
    time::Duration,
};

use model::Family;
use nix::sched::{CloneFlags, setns, unshare};
use socket2::{Domain, Protocol, Socket, Type};

use super::packet::{Packet, parse};
use crate::oracle::NODE_ADDRESSES;

/// The interfaces of the node and of everything else.
const NODE: &str = "probe0";
const OTHERS: &str = "probe1";
/// The protocols of packet sockets (linux/if_ether.h).
const ETHERTYPES: [u16; 2] = [0x0800, 0x86dd];
/// The size of the send and receive buffers, in bytes.
const BUFFER: usize = 4 << 20;

/// Settings of the node: it forwards, does not doubt sources, refuses without a limit, and forgets connections soon. What the
/// kernel does not have is not needed.
const SETTINGS: [(&str, &str); 20] = [
    ("ipv4/ip_forward", "1"),
    ("ipv6/conf/all/forwarding", "1"),
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/conf/all/accept_local", "1"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/default/accept_ra", "0"),
    ("ipv6/conf/default/router_solicitations", "0"),
    ("ipv4/icmp_ratelimit", "0"),
    ("ipv4/icmp_msgs_per_sec", "1000000"),
    ("ipv4/icmp_msgs_burst", "1000000"),
    ("ipv6/icmp/ratelimit", "0"),
    ("netfilter/nf_conntrack_tcp_timeout_syn_sent", "2"),
    ("netfilter/nf_conntrack_tcp_timeout_close", "2"),
    ("netfilter/nf_conntrack_udp_timeout", "2"),
    ("netfilter/nf_conntrack_icmp_timeout", "2"),
    ("netfilter/nf_conntrack_sctp_timeout_closed", "2"),
    ("netfilter/nf_conntrack_sctp_timeout_cookie_wait", "2"),
];

/// The namespaces; they end with this value and the processes in them.
#[derive(Debug)]
pub(super) struct Network {
    node: File,
    /// Send packets from anywhere, by family.
    senders: [Socket; 2],
    /// Receive what leaves the node, by family.
    receivers: [Socket; 2],
    buffer: Vec<u8>,
}

impl Network {
    /// Makes the namespaces. If `takes_all`, every packet that reaches the node is for a socket of it.
    pub(super) fn new(takes_all: bool) -> io::Result<Self> {
        let (node, others) = (namespace()?, namespace()?);
        inside(&node, || {
            for (name, value) in SETTINGS {
                // It may have another name there, or none.
                let _ = fs::write(format!("/proc/sys/net/{name}"), value);
            }
            let peer = format!("/proc/{}/fd/{}", process::id(), others.as_raw_fd());
            const MAC: &str = "address 02:00:00:00:00:01";
            ip(&format!("link add {NODE} {MAC} type veth peer name {OTHERS} {MAC} netns {peer}"))?;
            up(NODE, NODE_ADDRESSES)?;
            if takes_all {
                fs::write("/proc/sys/net/ipv6/ip_nonlocal_bind", "1")?;
            }
            for family in if takes_all { &["-4", "-6"][..] } else { &[] } {
                // What the node sends goes out, whatever its destination; everything else comes in.
                ip(&format!("{family} rule add pref 50 iif lo lookup 100"))?;
                ip(&format!("{family} route add default dev {NODE} table 100"))?;
                ip(&format!("{family} rule add pref 100 lookup local"))?;
                ip(&format!("{family} rule del pref 0"))?;
                ip(&format!("{family} route add local default dev lo table local"))?;
            }
            if takes_all {
                // The backend reaches its brain there.
                ip("-4 route add local 127.0.0.0/8 dev lo table 100")?;
            }
            io::Result::Ok(())
        })??;
        let (senders, receivers) = inside(&others, || {
            fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0")?;
            up(OTHERS, ["198.18.255.1", "fd00:ffff:ffff::1"])?;
            let sender = |domain| {
                const RAW: i32 = 255;
                let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(RAW)))?;
                socket.set_send_buffer_size(BUFFER)?;
                io::Result::Ok(socket)
            };
            let receiver = |ethertype: u16| {
                let protocol = Protocol::from(i32::from(ethertype.to_be()));
                let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(protocol))?;
                socket.set_recv_buffer_size(BUFFER)?;
                io::Result::Ok(socket)
            };
            let [v4, v6] = ETHERTYPES;
            io::Result::Ok(([sender(Domain::IPV4)?, sender(Domain::IPV6)?], [receiver(v4)?, receiver(v6)?]))
        })??;
        Ok(Self { node, senders, receivers, buffer: vec![0; 1 << 16] })
    }

    /// Does something as a thread of the node; a process that it starts is on the node, too.
    pub(super) fn on_node<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        inside(&self.node, work)
    }

    pub(super) fn send(&self, bytes: &[u8], destination: IpAddr) -> io::Result<()> {
        let socket = &self.senders[index(destination)];
        socket.send_to(bytes, &SocketAddr::new(destination, 0).into()).map(drop)
    }

    /// The next packet that leaves the node, with its bytes; `None` if there is none within the time.
    pub(super) fn receive(
        &mut self,
        family: IpAddr,
        timeout: Duration,
    ) -> io::Result<Option<(Packet, Vec<u8>)>> {
        let socket = &self.receivers[index(family)];
        socket.set_nonblocking(timeout.is_zero())?;
        if !timeout.is_zero() {
            socket.set_read_timeout(Some(timeout))?;
        }
        loop {
            match (&mut &*socket).read(&mut self.buffer) {
                Ok(length) => {
                    let bytes = &self.buffer[..length];
                    if let Some(packet) = parse(bytes) {
                        return Ok(Some((packet, bytes.to_vec())));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn index(ip: IpAddr) -> usize {
    usize::from(Family::of(ip) == Family::V6)
}

fn namespace() -> io::Result<File> {
    on_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        File::open("/proc/thread-self/ns/net")
    })
}

fn inside<T: Send>(namespace: &File, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_thread(|| {
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        Ok(work())
    })
}

/// On a thread of its own, which does not come back from another namespace.
fn on_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|it| it.spawn(work).join()).unwrap_or_else(|it| std::panic::resume_unwind(it))
}

/// Gives an interface these addresses, and all routes.
fn up(interface: &str, [v4, v6]: [&str; 2]) -> io::Result<()> {
    ip("link set lo up")?;
    ip(&format!("link set {interface} arp off up"))?;
    ip(&format!("address add {v4}/32 dev {interface}"))?;
    ip(&format!("address add {v6}/128 dev {interface} nodad"))?;
    ip(&format!("-4 route add default dev {interface}"))?;
    ip(&format!("-6 route add default dev {interface}"))
}

fn ip(arguments: &str) -> io::Result<()> {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    let output =
        output.map_err(|it| io::Error::other(format!("cannot start `ip` (package iproute2): {it}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!("`ip {arguments}`: {}", String::from_utf8_lossy(&output.stderr).trim())))
}
