//! The Service and the endpoints that most tests use.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub use crate::manifest::endpoint;

use crate::manifest::Service;

/// The cluster IPs of [`web`].
pub const WEB: [IpAddr; 2] = [IpAddr::V4(WEB4), IpAddr::V6(WEB6)];
pub const WEB4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
pub const WEB6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x10);
/// The first of the frontends of [`web`].
pub const FRONTEND: SocketAddr = SocketAddr::new(WEB[0], 80);
/// The port that every endpoint serves.
pub const TARGET_PORT: u16 = 8080;

/// The Service `web`: TCP and UDP at port 80, in both families, with the endpoints `web-N`.
pub fn web(endpoints: impl IntoIterator<Item = u8>) -> Service {
    Service::new("web", &WEB).tcp_and_udp(80, TARGET_PORT).endpoints(endpoints)
}

/// The Service `web` with IPv4 and TCP only.
pub fn web4(endpoints: impl IntoIterator<Item = u8>) -> Service {
    Service::new("web", &WEB[..1]).port("", "TCP", 80, TARGET_PORT).endpoints(endpoints)
}

/// Every notation of the frontend `web:80`: IPv4, IPv6 and IPv4-mapped.
pub fn web_frontends() -> [SocketAddr; 3] {
    [WEB[0], WEB[1], WEB4.to_ipv6_mapped().into()].map(|ip| SocketAddr::new(ip, 80))
}
