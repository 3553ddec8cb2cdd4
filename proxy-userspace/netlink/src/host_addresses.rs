//! The addresses of this host's network interfaces, and their changes.
//!
//! Invariant: notifications only trigger a new read of all addresses; their contents are ignored.

use std::{
    collections::BTreeSet,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv6Addr},
    os::unix::net::UnixDatagram as Datagrams,
    time::Duration,
};

use nix::{
    ifaddrs::{InterfaceAddress, getifaddrs},
    libc,
    net::if_::if_nametoindex,
    sys::socket::{SockFlag, SockProtocol},
};
use tokio::{
    net::UnixDatagram,
    time::{Instant, sleep_until},
};

use crate::socket::open;

/// To this interface kube-proxy's IPVS mode assigns the addresses of Services: they are not the host's own, and a kube-proxy
/// that is gone has left them.
const KUBE_IPVS: &str = "kube-ipvs0";
/// The delay before a failed read is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Follows the addresses of the network namespace in which it is used.
#[derive(Debug, Default)]
pub struct HostAddresses {
    /// A netlink socket, wrapped as a datagram socket; `None` until it could be opened.
    notifications: Option<UnixDatagram>,
    /// The addresses returned last.
    known: Option<BTreeSet<IpAddr>>,
    /// When a failed read is retried.
    retry_at: Option<Instant>,
}

impl HostAddresses {
    /// The current addresses if they differ from those returned last; `None` while they cannot be read.
    /// Must be called within a tokio runtime.
    pub fn poll(&mut self) -> Option<BTreeSet<IpAddr>> {
        let now = self.read_and_subscribe().inspect_err(|error| self.fail(error)).ok()?;
        if self.retry_at.take().is_some() {
            tracing::info!("the host's addresses can be read again");
        }
        (self.known.as_ref() != Some(&now)).then(|| self.known.insert(now).clone())
    }

    /// Waits until the addresses differ from those returned last. Cancel safe.
    pub async fn changed(&mut self) -> BTreeSet<IpAddr> {
        loop {
            match (&self.notifications, self.retry_at) {
                (Some(notifications), _) => {
                    if let Err(error) = next_notification(notifications).await {
                        self.fail(&error);
                        continue;
                    }
                }
                (None, Some(until)) => sleep_until(until).await,
                (None, None) => {}
            }
            if let Some(addresses) = self.poll() {
                return addresses;
            }
        }
    }

    /// Reads the addresses; later changes are notified.
    fn read_and_subscribe(&mut self) -> io::Result<BTreeSet<IpAddr>> {
        if self.notifications.is_none() {
            self.notifications = Some(listen()?);
        }
        read()
    }

    fn fail(&mut self, error: &io::Error) {
        self.notifications = None;
        if self.retry_at.replace(Instant::now() + RETRY_INTERVAL).is_none() {
            tracing::error!(
                %error, retry_in = ?RETRY_INTERVAL,
                "the host's addresses cannot be read; the last ones stay in use"
            );
        }
    }
}

fn listen() -> io::Result<UnixDatagram> {
    let groups = (libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR).cast_unsigned();
    let netlink = open(SockProtocol::NetlinkRoute, groups, SockFlag::SOCK_NONBLOCK)?;
    UnixDatagram::from_std(Datagrams::from(netlink))
}

async fn next_notification(notifications: &UnixDatagram) -> io::Result<()> {
    notifications.readable().await?;
    let mut buffer = [0; 4096];
    loop {
        match notifications.try_recv(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            // Notifications were dropped for want of room: something changed.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
            result => drop(result?),
        }
    }
}

/// The addresses that other hosts can reach: neither loopback nor link-local ones, nor those of `kube-ipvs0`.
pub fn read() -> io::Result<BTreeSet<IpAddr>> {
    let interfaces = getifaddrs()?.filter(|it| it.interface_name != KUBE_IPVS);
    Ok(interfaces.filter_map(|it| address_of(&it)).filter(is_reachable).collect())
}

/// The numbers of the interfaces that have such an address.
pub fn interfaces_with(is_wanted: impl Fn(IpAddr) -> bool) -> io::Result<BTreeSet<u32>> {
    let interfaces = getifaddrs()?.filter(|it| address_of(it).is_some_and(&is_wanted));
    // One that has gone meanwhile has no number.
    Ok(interfaces.filter_map(|it| if_nametoindex(it.interface_name.as_str()).ok()).collect())
}

fn address_of(interface: &InterfaceAddress) -> Option<IpAddr> {
    let address = interface.address.as_ref()?;
    let v4 = address.as_sockaddr_in().map(|it| IpAddr::V4(it.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|it| IpAddr::V6(it.ip())))
}

fn is_reachable(address: &IpAddr) -> bool {
    let on_one_link = matches!(address, IpAddr::V6(it) if Ipv6Addr::is_unicast_link_local(it));
    !address.is_loopback() && !address.is_unspecified() && !on_one_link
}

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, os::fd::OwnedFd};

    use tokio::time::timeout;

    use super::*;
    use crate::in_netns::{in_netns, run};

    fn ip(arguments: &str) {
        run(&format!("ip {arguments}"));
    }

    /// Runs a test in a network namespace, whose time is paused.
    fn in_a_netns(test: impl AsyncFnOnce() + Send) {
        in_netns("ip", || {
            ip("link set lo up");
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
            runtime.unwrap().block_on(test());
        });
    }

    #[test]
    fn only_different_addresses_are_returned() {
        in_a_netns(async || {
            let mut addresses = HostAddresses::default();
            assert_eq!(
                addresses.poll(),
                Some(BTreeSet::new()),
                "the first read counts, even if there are none"
            );
            assert_eq!(addresses.poll(), None);
            // As each end of a pod's veth pair gets one.
            ip("addr add fe80::7/64 dev lo nodad");
            ip("addr add 127.0.0.7/32 dev lo");
            // The notifications so far changed no reachable address.
            assert!(timeout(RETRY_INTERVAL, addresses.changed()).await.is_err());
            ip("addr add 192.0.2.7/24 dev lo");
            assert_eq!(addresses.changed().await, [IpAddr::from([192, 0, 2, 7])].into());
            ip("addr del 192.0.2.7/24 dev lo");
            assert_eq!(addresses.changed().await, BTreeSet::new());
            // As kube-proxy's IPVS mode leaves them.
            ip("link add kube-ipvs0 type veth peer name other");
            ip("addr add 10.96.0.1/32 dev kube-ipvs0");
            ip("addr add 192.0.2.8/24 dev lo");
            assert_eq!(addresses.changed().await, [IpAddr::from([192, 0, 2, 8])].into());
        });
    }

    #[test]
    fn reading_recovers_after_an_error() {
        in_a_netns(async || {
            let mut addresses = HostAddresses::default();
            assert_eq!(addresses.poll(), Some(BTreeSet::new()));
            // A socket with a pending datagram whose next read fails: its peer is gone.
            let (broken, peer) =
                (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
            broken.connect(peer.local_addr().unwrap()).unwrap();
            peer.send_to(b"!", broken.local_addr().unwrap()).unwrap();
            drop(peer);
            broken.send(b"?").unwrap();
            broken.set_nonblocking(true).unwrap();
            addresses.notifications = Some(UnixDatagram::from_std(OwnedFd::from(broken).into()).unwrap());
            ip("addr add 192.0.2.7/24 dev lo");
            assert_eq!(addresses.changed().await, [IpAddr::from([192, 0, 2, 7])].into());
            ip("addr add 192.0.2.8/24 dev lo");
            assert!(addresses.changed().await.contains(&IpAddr::from([192, 0, 2, 8])));
            assert_eq!(addresses.retry_at, None);
        });
    }
}
