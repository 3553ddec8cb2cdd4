//! The addresses of this host's network interfaces, and when they change.
//!
//! The one rule: the kernel's announcements only say *that* something changed; what there is, is then read as a whole.

use std::{
    collections::BTreeSet,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv6Addr},
    os::{fd::AsRawFd as _, unix::net::UnixDatagram as Datagrams},
    time::Duration,
};

use nix::{
    ifaddrs::getifaddrs,
    sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, socket},
};
use tokio::{
    net::UnixDatagram,
    time::{Instant, sleep_until},
};

/// How long to wait before what failed is tried again.
const PAUSE: Duration = Duration::from_secs(5);

/// Follows the addresses of the network namespace that it is used in.
#[derive(Debug)]
pub(crate) struct Addresses {
    /// A netlink socket: datagrams, received as from any other socket of datagrams. None while it could not be had.
    announcements: Option<UnixDatagram>,
    /// Those that were handed out last.
    known: Option<BTreeSet<IpAddr>>,
    /// Since when something fails, plus a pause.
    failing_until: Option<Instant>,
}

impl Addresses {
    /// Knows none yet.
    pub(crate) fn new() -> Self {
        Self { announcements: None, known: None, failing_until: None }
    }

    /// The addresses that there are now, if they are others than were handed out last; none while they cannot be read.
    /// Must be called within a tokio runtime.
    pub(crate) fn news(&mut self) -> Option<BTreeSet<IpAddr>> {
        let now = match self.look() {
            Ok(now) => now,
            Err(error) => {
                self.fail(&error);
                return None;
            }
        };
        if self.failing_until.take().is_some() {
            tracing::info!("the host's addresses are followed again");
        }
        (self.known.as_ref() != Some(&now)).then(|| self.known.insert(now).clone())
    }

    /// Waits until there are others than were handed out last. Nothing is lost if it is dropped before.
    pub(crate) async fn changed(&mut self) -> BTreeSet<IpAddr> {
        loop {
            match (&self.announcements, self.failing_until) {
                (Some(announcements), _) => {
                    if let Err(error) = heard(announcements).await {
                        self.fail(&error);
                        continue;
                    }
                }
                (None, Some(until)) => sleep_until(until).await,
                (None, None) => {}
            }
            if let Some(news) = self.news() {
                return news;
            }
        }
    }

    /// Reads them; whatever changes from then on is announced.
    fn look(&mut self) -> io::Result<BTreeSet<IpAddr>> {
        if self.announcements.is_none() {
            self.announcements = Some(listen()?);
        }
        read()
    }

    fn fail(&mut self, error: &io::Error) {
        self.announcements = None;
        if self.failing_until.replace(Instant::now() + PAUSE).is_none() {
            tracing::error!(
                "the host's addresses are not followed: {error}; it is tried again every {PAUSE:?}"
            );
        }
    }
}

fn listen() -> io::Result<UnixDatagram> {
    let groups = (libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR).cast_unsigned();
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let netlink = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
    bind(netlink.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
    UnixDatagram::from_std(Datagrams::from(netlink))
}

/// Waits until an address has come or gone.
async fn heard(announcements: &UnixDatagram) -> io::Result<()> {
    announcements.readable().await?;
    let mut buffer = [0; 4096];
    loop {
        match announcements.try_recv(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            // Announcements were lost for want of room: something changed all the same.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
            result => drop(result?),
        }
    }
}

/// What can be reached from elsewhere: neither loopback addresses nor those that mean something on one link only.
///
/// # Errors
///
/// If the kernel does not list them.
pub fn read() -> io::Result<BTreeSet<IpAddr>> {
    let addresses = getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|it| IpAddr::V4(it.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|it| IpAddr::V6(it.ip())))
    });
    Ok(addresses.filter(is_reachable).collect())
}

fn is_reachable(address: &IpAddr) -> bool {
    let on_one_link = matches!(address, IpAddr::V6(it) if Ipv6Addr::is_unicast_link_local(it));
    !address.is_loopback() && !address.is_unspecified() && !on_one_link
}

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, os::fd::OwnedFd, process::Command, thread};

    use nix::sched::{CloneFlags, unshare};
    use tokio::time::timeout;

    use super::*;

    fn ip(arguments: &str) {
        let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "ip {arguments}");
    }

    /// Runs a test in a network namespace that goes away with its thread, or says why not.
    fn in_a_namespace(test: impl AsyncFnOnce() + Send) {
        let run = || {
            if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
                eprintln!("skipped: no network namespace can be made: {error}");
                return;
            }
            if Command::new("ip").arg("-V").output().is_err() {
                eprintln!("skipped: there is no ip: install iproute2");
                return;
            }
            ip("link set lo up");
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
            runtime.unwrap().block_on(test());
        };
        thread::scope(|scope| scope.spawn(run).join().unwrap());
    }

    #[test]
    fn only_other_addresses_are_news() {
        in_a_namespace(async || {
            let mut addresses = Addresses::new();
            assert_eq!(addresses.news(), Some(BTreeSet::new()), "at first, even none are news");
            assert_eq!(addresses.news(), None);
            // As each pod's end of a veth pair gets one.
            ip("addr add fe80::7/64 dev lo nodad");
            ip("addr add 127.0.0.7/32 dev lo");
            // What was announced until now is found to be none.
            assert!(timeout(PAUSE, addresses.changed()).await.is_err());
            ip("addr add 192.0.2.7/24 dev lo");
            assert_eq!(addresses.changed().await, [IpAddr::from([192, 0, 2, 7])].into());
            ip("addr del 192.0.2.7/24 dev lo");
            assert_eq!(addresses.changed().await, BTreeSet::new());
        });
    }

    #[test]
    fn after_an_error_they_are_followed_again() {
        in_a_namespace(async || {
            let mut addresses = Addresses::new();
            assert_eq!(addresses.news(), Some(BTreeSet::new()));
            // Something lies there, and the next read fails all the same: whom it was sent to is gone.
            let (broken, peer) =
                (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
            broken.connect(peer.local_addr().unwrap()).unwrap();
            peer.send_to(b"!", broken.local_addr().unwrap()).unwrap();
            drop(peer);
            broken.send(b"?").unwrap();
            broken.set_nonblocking(true).unwrap();
            addresses.announcements = Some(UnixDatagram::from_std(OwnedFd::from(broken).into()).unwrap());
            ip("addr add 192.0.2.7/24 dev lo");
            assert_eq!(addresses.changed().await, [IpAddr::from([192, 0, 2, 7])].into());
            ip("addr add 192.0.2.8/24 dev lo");
            assert!(addresses.changed().await.contains(&IpAddr::from([192, 0, 2, 8])));
            assert_eq!(addresses.failing_until, None);
        });
    }
}
