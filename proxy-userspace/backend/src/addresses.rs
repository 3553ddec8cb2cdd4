//! The addresses of this host's network interfaces, and when they change.
//!
//! The one rule: the kernel's announcements only say *that* something changed; what there is, is then read as a whole.

use std::{
    collections::BTreeSet,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv6Addr},
    os::{fd::AsRawFd as _, unix::net::UnixDatagram as Datagrams},
};

use nix::{
    ifaddrs::getifaddrs,
    sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, socket},
};
use tokio::net::UnixDatagram;

/// Follows the addresses of the network namespace that it is made in.
#[derive(Debug)]
pub(crate) struct Addresses {
    /// A netlink socket: datagrams, received as from any other socket of datagrams.
    announcements: UnixDatagram,
}

impl Addresses {
    /// Begins to listen. Must be called within a tokio runtime.
    pub(crate) fn listen() -> io::Result<Self> {
        let groups = (libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR).cast_unsigned();
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let netlink = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        bind(netlink.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        Ok(Self { announcements: UnixDatagram::from_std(Datagrams::from(netlink))? })
    }

    /// Waits until an address has come or gone. Nothing is lost if it is dropped before.
    pub(crate) async fn changed(&mut self) -> io::Result<()> {
        self.announcements.readable().await?;
        let mut buffer = [0; 4096];
        loop {
            match self.announcements.try_recv(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // Announcements were lost for want of room: something changed all the same.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                result => drop(result?),
            }
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
