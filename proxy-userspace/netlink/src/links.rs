//! The network interfaces of this network namespace, and the programs that the kernel runs there.

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};
use nix::{
    errno::Errno,
    libc,
    sys::socket::{SockFlag, SockProtocol},
};

use crate::{
    attribute::{Attribute, find, text},
    socket::{ask, open},
    uapi::{
        IFLA_IFNAME, IFLA_MTU, IFLA_XDP, IFLA_XDP_DRV_PROG_ID, IFLA_XDP_HW_PROG_ID, IFLA_XDP_PROG_ID,
        IFLA_XDP_SKB_PROG_ID, TC_H_CLSACT, TC_H_CLSACT_EGRESS, TC_H_CLSACT_INGRESS, TC_H_CLSACT_PARENT,
        TCA_BPF_ID, TCA_KIND, TCA_OPTIONS,
    },
};

/// The length of `struct ifinfomsg` and of `struct tcmsg` (linux/rtnetlink.h), in bytes.
const INTERFACE: usize = 16;
const CLASSIFIER: usize = 20;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    pub name: String,
    /// How many bytes a packet may have, without the header of the link.
    pub mtu: u32,
    pub is_ethernet: bool,
    /// The ids of its XDP programs.
    pub xdp: Vec<u32>,
}

/// A classifier at clsact or at the ingress qdisc, which decides on packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classifier {
    /// `ingress` or `egress`.
    pub direction: &'static str,
    /// Its kind, such as `bpf` or `flower`.
    pub kind: String,
    /// The id of its program, if it is one.
    pub program: Option<u32>,
}

/// Reads an interface by its number; `None` if there is none.
pub fn read(index: u32) -> io::Result<Option<Link>> {
    let header = [0, index, 0, 0].map(u32::to_ne_bytes).concat();
    let mut link = None;
    match request(libc::RTM_GETLINK, NLM_F_ACK, &header, &[], |payload| link = parse_link(payload)) {
        Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(None),
        result => result.map(|()| link),
    }
}

fn parse_link(payload: &[u8]) -> Option<Link> {
    let (header, attributes) = payload.split_at_checked(INTERFACE)?;
    let programs = find(attributes, IFLA_XDP).unwrap_or_default();
    let ids = [IFLA_XDP_PROG_ID, IFLA_XDP_DRV_PROG_ID, IFLA_XDP_SKB_PROG_ID, IFLA_XDP_HW_PROG_ID];
    let mut xdp: Vec<_> = ids.iter().filter_map(|it| number(find(programs, *it)?)).collect();
    xdp.retain(|it| *it != 0);
    xdp.sort_unstable();
    xdp.dedup();
    Some(Link {
        name: text(find(attributes, IFLA_IFNAME)?),
        mtu: number(find(attributes, IFLA_MTU)?)?,
        is_ethernet: u16::from_ne_bytes([header[2], header[3]]) == libc::ARPHRD_ETHER,
        xdp,
    })
}

/// Lists the classifiers of an interface, in no order.
pub fn classifiers(index: u32) -> io::Result<Vec<Classifier>> {
    let mut found = Vec::new();
    for (direction, parent) in [("ingress", TC_H_CLSACT_INGRESS), ("egress", TC_H_CLSACT_EGRESS)] {
        let header = [0, index, 0, parent, 0].map(u32::to_ne_bytes).concat();
        let listed = request(libc::RTM_GETTFILTER, NLM_F_DUMP, &header, &[], |payload| {
            found.extend(parse_classifier(payload, direction));
        });
        match listed {
            // There is neither qdisc.
            Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {}
            result => result?,
        }
    }
    Ok(found)
}

/// One that has options: a priority has an entry of its own, without.
fn parse_classifier(payload: &[u8], direction: &'static str) -> Option<Classifier> {
    let attributes = payload.get(CLASSIFIER..)?;
    let kind = text(find(attributes, TCA_KIND)?);
    let options = find(attributes, TCA_OPTIONS)?;
    let program = if kind == "bpf" { find(options, TCA_BPF_ID).and_then(number) } else { None };
    Some(Classifier { direction, kind, program })
}

/// 32 bits in the byte order of this machine.
fn number(value: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(value.try_into().ok()?))
}

/// Deletes an interface; false if it does not exist.
pub fn delete(name: &str) -> io::Result<bool> {
    let attributes = [Attribute::text(IFLA_IFNAME, name)];
    match request(libc::RTM_DELLINK, NLM_F_ACK, &[0; INTERFACE], &attributes, |_| ()) {
        Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(false),
        result => result.map(|()| true),
    }
}

/// Deletes the queueing discipline `clsact` of an interface if it has no classifiers; false if it has.
///
/// # Errors
///
/// If it does not exist, or the kernel refuses it.
pub fn delete_empty_clsact(index: u32) -> io::Result<bool> {
    if !classifiers(index)?.is_empty() {
        return Ok(false);
    }
    let header = [0, index, TC_H_CLSACT, TC_H_CLSACT_PARENT, 0].map(u32::to_ne_bytes).concat();
    request(libc::RTM_DELQDISC, NLM_F_ACK, &header, &[], |_| ()).map(|()| true)
}

/// Sends a request, and passes each answer to `each` until the kernel has acknowledged it, or has listed everything.
fn request(
    kind: u16,
    flags: u16,
    fixed: &[u8],
    attributes: &[Attribute],
    mut each: impl FnMut(&[u8]),
) -> io::Result<()> {
    let socket = open(SockProtocol::NetlinkRoute, 0, SockFlag::empty())?;
    ask(&socket, (kind, flags), fixed, attributes, |payload| {
        each(payload);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::net::if_::if_nametoindex;

    use super::*;
    use crate::in_netns::{in_netns, run};

    #[test]
    fn an_interface_is_read_until_it_is_deleted() {
        in_netns("tc", || {
            run("ip link add veth0 mtu 1400 type veth peer name veth1");
            let index = if_nametoindex("veth0").unwrap();
            let link = Link { name: "veth0".into(), mtu: 1400, is_ethernet: true, xdp: Vec::new() };
            assert_eq!(read(index).unwrap(), Some(link));
            assert_eq!(classifiers(index).unwrap(), []);
            let lo = read(if_nametoindex("lo").unwrap()).unwrap().unwrap();
            assert!(!lo.is_ethernet, "{lo:?}");
            assert!(delete("veth0").unwrap());
            assert!(!delete("veth0").unwrap());
            assert_eq!(read(index).unwrap(), None);
        });
    }

    #[test]
    fn each_xdp_program_is_named_once() {
        let number = |kind, value: u32| Attribute::bytes(kind, value.to_ne_bytes());
        let programs =
            [number(IFLA_XDP_PROG_ID, 7), number(IFLA_XDP_DRV_PROG_ID, 7), number(IFLA_XDP_SKB_PROG_ID, 9)];
        let attributes = [
            Attribute::text(IFLA_IFNAME, "eth0"),
            number(IFLA_MTU, 1500),
            Attribute::nested(IFLA_XDP, programs),
        ];
        let mut payload = vec![0; INTERFACE];
        attributes.iter().for_each(|it| it.append(&mut payload));
        let link = parse_link(&payload).unwrap();
        assert_eq!((&*link.name, link.mtu, &link.xdp[..]), ("eth0", 1500, &[7, 9][..]));
        for length in 0..payload.len() {
            let _ = parse_link(&payload[..length]);
        }
    }

    #[test]
    fn classifiers_are_listed_by_direction() {
        in_netns("tc", || {
            run("ip link add veth0 type veth peer name veth1");
            let index = if_nametoindex("veth0").unwrap();
            let clsact = Command::new("tc").args(["qdisc", "add", "dev", "veth0", "clsact"]).status();
            if !clsact.unwrap().success() {
                return eprintln!("skipped: this kernel has no clsact");
            }
            assert_eq!(classifiers(index).unwrap(), []);
            // A classic program, which has no id.
            let filter = ["filter", "add", "dev", "veth0", "egress", "bpf", "da", "bytecode", "1,6 0 0 0,"];
            if !Command::new("tc").args(filter).status().unwrap().success() {
                return eprintln!("skipped: this kernel has no classifier bpf");
            }
            let kind = "bpf".to_owned();
            let expect = Classifier { direction: "egress", kind, program: None };
            assert_eq!(classifiers(index).unwrap(), [expect]);
            assert!(!delete_empty_clsact(index).unwrap(), "a classifier is there");
            run("tc filter delete dev veth0 egress");
            assert!(delete_empty_clsact(index).unwrap());
            assert!(delete_empty_clsact(index).is_err(), "it has gone");
        });
    }
}
