//! The kernel's maps in words: one line per entry, sorted, so that two equal generations read the same.
//!
//! Ids and positions are resolved, because they differ from history to history. A backend that several addresses share has a
//! line for each of them; an entry that no address leads to is shown as an orphan, with its id or position.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use bytemuck::{AnyBitPattern, Zeroable as _};
use datapath::{ActiveFrontend, PortId};
use model::Family;
use proxy_common::{
    net::{Be16, V6},
    tables::{
        Backend4, Backend6, BackendEntry4, BackendEntry6, BackendSetMember, BackendSetMemberKey4,
        BackendSetMemberKey6, Frontend, FrontendKey4, FrontendKey6, LOCAL_ADDRESSES_ONLY, NodeAddrScope,
        NodePortKey, TCP, UDP,
    },
};

use crate::{
    bpf_maps,
    error::Error,
    pins::Pins,
    store::{Side, Table},
};

/// How often to begin anew because another generation came into force meanwhile.
const ATTEMPTS: usize = 20;

/// Reads the generation in force, and describes every entry of it.
///
/// # Errors
///
/// If nothing was ever in force there, or it changes faster than it can be read; a map that is missing, of another layout
/// or not to be read is named.
pub fn dump(pin_dir: &Path) -> Result<Vec<String>, Error> {
    in_force(pin_dir).map(|it| it.lines())
}

/// Reads the generation in force: every address that is led somewhere, in ascending order.
///
/// # Errors
///
/// As for [`dump`].
pub fn active_frontends(pin_dir: &Path) -> Result<Vec<ActiveFrontend>, Error> {
    in_force(pin_dir).map(|it| it.active_frontends())
}

/// Reads how many generations have been in force there, the one that is included.
///
/// # Errors
///
/// As for [`dump`].
pub fn generation(pin_dir: &Path) -> Result<u32, Error> {
    bpf_maps::read_active(&filled(pin_dir)?).map(|(_, flips)| flips)
}

/// Pins below which a generation was ever in force.
fn filled(pin_dir: &Path) -> Result<Pins, Error> {
    let pins = Pins::new(pin_dir);
    if bpf_maps::is_filled(&pins)? { Ok(pins) } else { Err(Error::Nothing(pin_dir.to_path_buf())) }
}

fn in_force(pin_dir: &Path) -> Result<Generation, Error> {
    let pins = filled(pin_dir)?;
    let generation = unchanged(|| bpf_maps::read_active(&pins), |(side, _)| Generation::read(&pins, side))?;
    generation.ok_or_else(|| Error::Restless(pin_dir.to_path_buf()))
}

/// Reads what a word leads to. Flips between the first map and the last could show a mixture: then it is read again, until
/// it is time to give up (none).
fn unchanged<W: Copy + PartialEq, T>(
    mut word: impl FnMut() -> Result<W, Error>,
    mut read: impl FnMut(W) -> Result<T, Error>,
) -> Result<Option<T>, Error> {
    for _ in 0..ATTEMPTS {
        let before = word()?;
        let found = read(before)?;
        if word()? == before {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

#[derive(Default)]
struct Generation {
    frontends: Vec<(String, Family, Frontend)>,
    /// By family, and by position there.
    backends: BTreeMap<(Family, u32), SocketAddr>,
    members: Vec<(u32, SocketAddr)>,
    places: Vec<(IpAddr, NodeAddrScope)>,
}

impl Generation {
    fn read(pins: &Pins, side: Side) -> Result<Self, Error> {
        let mut it = Self::default();
        for (key, row) in rows::<FrontendKey4, Frontend>(pins, side, Table::Frontends4)? {
            let name = frontend(IpAddr::V4(key.address.into()), key.port, key.protocol);
            it.frontends.push((name, Family::V4, row));
        }
        for (key, row) in rows::<FrontendKey6, Frontend>(pins, side, Table::Frontends6)? {
            let name = frontend(IpAddr::V6(key.address.into()), key.port, key.protocol);
            it.frontends.push((name, Family::V6, row));
        }
        for (key, row) in rows::<NodePortKey, Frontend>(pins, side, Table::NodePorts)? {
            let any = match key.ip_version {
                4 => IpAddr::from(Ipv4Addr::UNSPECIFIED),
                _ => Ipv6Addr::UNSPECIFIED.into(),
            };
            it.frontends.push((frontend(any, key.port, key.protocol), Family::of(any), row));
        }
        for (key, place) in rows::<V6, NodeAddrScope>(pins, side, Table::NodeAddrs)? {
            it.places.push((key.into(), place));
        }
        for (position, row) in rows::<u32, BackendEntry4>(pins, side, Table::Backends4)? {
            if row != BackendEntry4::zeroed() {
                it.backends.insert((Family::V4, position), backend4(&row.backend));
            }
        }
        for (position, row) in rows::<u32, BackendEntry6>(pins, side, Table::Backends6)? {
            if row != BackendEntry6::zeroed() {
                it.backends.insert((Family::V6, position), backend6(&row.backend));
            }
        }
        for (key, _) in rows::<BackendSetMemberKey4, BackendSetMember>(pins, side, Table::Members4)? {
            it.members.push((key.set, backend4(&key.backend)));
        }
        for (key, _) in rows::<BackendSetMemberKey6, BackendSetMember>(pins, side, Table::Members6)? {
            it.members.push((key.set, backend6(&key.backend)));
        }
        Ok(it)
    }

    fn active_frontends(&self) -> Vec<ActiveFrontend> {
        let led = self.frontends.iter().map(|(name, family, row)| {
            let mut backends: Vec<_> = self.behind(*family, row).map(|(_, it)| it).collect();
            backends.sort_unstable();
            ActiveFrontend { frontend: name.clone(), backends, port: Some(PortId(row.service_port)) }
        });
        let mut led: Vec<_> = led.collect();
        led.sort_unstable();
        led
    }

    /// The backends of a frontend, with their positions.
    fn behind(&self, family: Family, row: &Frontend) -> impl Iterator<Item = (u32, SocketAddr)> {
        let positions =
            (family, row.backend_offset)..(family, row.backend_offset.saturating_add(row.backend_count));
        self.backends.range(positions).map(|((_, position), it)| (*position, *it))
    }

    fn lines(&self) -> Vec<String> {
        let mut by_set: HashMap<u32, Vec<&str>> = HashMap::new();
        for (name, _, row) in &self.frontends {
            by_set.entry(row.set).or_default().push(name);
        }
        let owners = |set: &u32| by_set.get(set).into_iter().flatten();
        let mut lines: Vec<String> = self
            .frontends
            .iter()
            .map(|(name, _, row)| {
                let local_only = row.flags & LOCAL_ADDRESSES_ONLY != 0;
                let local_only = if local_only { " local-addresses-only" } else { "" };
                let affinity = match row.affinity_timeout {
                    0 => String::new(),
                    seconds => format!(" affinity={seconds}s"),
                };
                format!("frontend {name} backends={}{affinity}{local_only}", row.backend_count)
            })
            .collect();
        lines.extend(self.places.iter().map(|(address, place)| match *place {
            NodeAddrScope::LOCAL => format!("node-address {address} local"),
            NodeAddrScope::REMOTE => format!("node-address {address} remote"),
            NodeAddrScope::LOOPBACK => format!("node-address {address} loopback"),
            NodeAddrScope(unknown) => format!("node-address {address} {unknown}"),
        }));
        let mut orphans = self.backends.clone();
        for (name, family, row) in &self.frontends {
            for (position, backend) in self.behind(*family, row) {
                lines.push(format!("backend {name} -> {backend}"));
                orphans.remove(&(*family, position));
            }
        }
        lines.extend(
            orphans
                .iter()
                .map(|((_, position), backend)| format!("orphan backend position={position} -> {backend}")),
        );
        for (set, backend) in &self.members {
            let before = lines.len();
            lines.extend(owners(set).map(|name| format!("member {name} {backend}")));
            if lines.len() == before {
                lines.push(format!("orphan member set={set} {backend}"));
            }
        }
        lines.sort_unstable();
        lines
    }
}

fn rows<K: AnyBitPattern, V: AnyBitPattern>(
    pins: &Pins,
    side: Side,
    table: Table,
) -> Result<Vec<(K, V)>, Error> {
    let (keys, values) = bpf_maps::read(&pins.inner(side, table), bpf_maps::entry(table))?;
    let keys = keys.chunks_exact(size_of::<K>()).map(bytemuck::pod_read_unaligned);
    let values = values.chunks_exact(size_of::<V>()).map(bytemuck::pod_read_unaligned);
    Ok(keys.zip(values).collect())
}

fn frontend(ip: IpAddr, port: Be16, protocol: u8) -> String {
    let address = SocketAddr::new(ip, port.get());
    match protocol {
        TCP => format!("{address}/TCP"),
        UDP => format!("{address}/UDP"),
        other => format!("{address}/{other}"),
    }
}

fn backend4(it: &Backend4) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(it.address.into()), it.port.get())
}

fn backend6(it: &Backend6) -> SocketAddr {
    SocketAddr::new(IpAddr::V6(it.address.into()), it.port.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_stands_still_is_given_up() {
        let (mut flips, mut reads) = (0, 0);
        let word = || {
            flips += 1;
            Ok(flips)
        };
        let read = |_| {
            reads += 1;
            Ok(())
        };
        assert_eq!(unchanged(word, read).unwrap(), None);
        assert_eq!(reads, ATTEMPTS);
    }

    #[test]
    fn what_changes_while_it_is_read_is_read_again() {
        let mut words = [1, 2, 2, 3, 3, 3].into_iter();
        let word = || Ok(words.next().unwrap());
        assert_eq!(unchanged(word, Ok).unwrap(), Some(3), "neither 1, nor 2 with something of 3 in it");
    }
}
