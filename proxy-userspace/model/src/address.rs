//! Which addresses may be used for what.
//!
//! The rules are the API server's (`ValidateEndpointIP` in `pkg/apis/core/validation`, `ip.go` in `k8s.io/apimachinery`). It
//! applies them to endpoints and external IPs; other addresses are refused here only where using them would take over
//! addresses of the node or of its links.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressUse {
    /// An endpoint, an external IP, or a load balancer IP.
    Endpoint,
    /// A cluster IP, which the cluster administrator has assigned, or an address of a node: it may be link-local.
    Assigned,
}

/// Why an address cannot be used, as the end of a message; `None` if it can.
pub fn refusal(address: IpAddr, used_as: AddressUse) -> Option<&'static str> {
    let is_link_local = match address {
        IpAddr::V4(it) => it.is_link_local(),
        IpAddr::V6(it) => it.is_unicast_link_local(),
    };
    if address != address.to_canonical() {
        // The kernel would use it as the IPv4 address.
        Some("is an IPv4-mapped IPv6 address; write it as an IPv4 address")
    } else if address.is_unspecified() || address.is_multicast() || address == Ipv4Addr::BROADCAST {
        Some("is not a unicast address; use the address of a host")
    } else if address.is_loopback() {
        Some("is a loopback address, which every host has; use the address of one host")
    } else if is_link_local && used_as == AddressUse::Endpoint {
        Some("is a link-local address, as those of a cloud's metadata service; use a routed one")
    } else {
        None
    }
}

/// Parses an address as kube-proxy does (`ParseIPSloppy` in `k8s.io/utils/net`): the numbers of an IPv4 address may have
/// leading zeros, and an IPv4-mapped IPv6 address is the IPv4 address inside.
pub fn parse(text: &str) -> Option<IpAddr> {
    let address = text.parse::<IpAddr>().or_else(|_| without_leading_zeros(text).parse());
    address.ok().map(|it| it.to_canonical())
}

/// Parses a range as kube-proxy does (`ParseCIDRSloppy`), and makes it canonical.
pub fn parse_range(text: &str) -> Option<IpNet> {
    let range = text.parse::<IpNet>().or_else(|_| without_leading_zeros(text).parse());
    range.ok().map(canonical_range)
}

/// The text without leading zeros of decimal numbers: of an IPv4 address, or of the one at the end of an IPv6 address.
fn without_leading_zeros(text: &str) -> String {
    let v4 = text.rfind(':').unwrap_or(0);
    let is_digit = |it: Option<char>| it.is_some_and(|it| it.is_ascii_digit());
    let mut out = String::with_capacity(text.len());
    for (at, it) in text.char_indices() {
        let is_leading = it == '0' && !is_digit(out.chars().next_back());
        if at < v4 || !is_leading || !is_digit(text[at + 1..].chars().next()) {
            out.push(it);
        }
    }
    out
}

/// A range without host bits; one of IPv4-mapped addresses becomes the range of IPv4 that it means.
pub fn canonical_range(range: IpNet) -> IpNet {
    let IpNet::V6(it) = range.trunc() else { return range.trunc() };
    let v4 = it.addr().to_ipv4_mapped().zip(it.prefix_len().checked_sub(96));
    v4.and_then(|(address, length)| Ipv4Net::new(address, length).ok()).map_or(IpNet::V6(it), IpNet::V4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_one_host_are_accepted() {
        for (text, is_endpoint, is_assigned) in [
            ("10.0.0.1", true, true),
            ("2001:db8::1", true, true),
            ("fc00::1", true, true),
            ("240.0.0.1", true, true),
            ("169.254.169.254", false, true),
            ("fe80::1", false, true),
            ("127.0.0.1", false, false),
            ("127.255.255.255", false, false),
            ("::1", false, false),
            ("0.0.0.0", false, false),
            ("::", false, false),
            ("224.0.0.1", false, false),
            ("239.255.255.255", false, false),
            ("255.255.255.255", false, false),
            ("ff02::1", false, false),
            ("ff0e::1", false, false),
            ("::ffff:10.0.0.1", false, false),
            ("::ffff:127.0.0.1", false, false),
        ] {
            let is_used = |used_as| refusal(text.parse().unwrap(), used_as).is_none();
            let found = (is_used(AddressUse::Endpoint), is_used(AddressUse::Assigned));
            assert_eq!(found, (is_endpoint, is_assigned), "{text}");
        }
    }

    #[test]
    fn addresses_and_ranges_are_read_as_kube_proxy_reads_them() {
        for (text, expect) in [
            ("10.0.0.1", Some("10.0.0.1")),
            ("10.096.0.011", Some("10.96.0.11")),
            ("000010.0.00.0", Some("10.0.0.0")),
            ("::ffff:10.96.0.1", Some("10.96.0.1")),
            ("::ffff:010.096.0.01", Some("10.96.0.1")),
            ("::ffff:a60:1", Some("10.96.0.1")),
            ("2001:0db8::0001", Some("2001:db8::1")),
            ("10.0.0.0400", None),
            ("10.0.0", None),
            ("10.0.0.0x1", None),
            ("fe80::1%eth0", None),
            (" 10.0.0.1", None),
            ("", None),
        ] {
            assert_eq!(parse(text).map(|it| it.to_string()).as_deref(), expect, "{text}");
        }
        for (text, expect) in [
            ("010.01.2.3/08", Some("10.0.0.0/8")),
            ("::ffff:010.1.2.3/104", Some("10.0.0.0/8")),
            ("10.1.2.3/8", Some("10.0.0.0/8")),
            ("2001:db8::1/32", Some("2001:db8::/32")),
            ("::ffff:10.1.2.3/104", Some("10.0.0.0/8")),
            ("::ffff:0.0.0.0/96", Some("0.0.0.0/0")),
            ("::ffff:10.0.0.0/95", Some("::fffe:0:0/95")),
            ("::/0", Some("::/0")),
            ("10.0.0.0/33", None),
            ("10.0.0.1", None),
        ] {
            assert_eq!(parse_range(text).map(|it| it.to_string()).as_deref(), expect, "{text}");
        }
    }
}
