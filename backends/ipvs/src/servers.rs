//! Virtual servers: what the kernel has, and the lines of `ipvsadm` that make them what is wanted.
//!
//! Invariant: pure. Only virtual servers with a mark of this program are seen.

use std::{collections::BTreeMap, net::SocketAddr};

use proxy_contract::backend::Family;

use crate::marks::{MASK, PREFIX, is_drained};

/// Virtual servers, by mark.
pub(crate) type Servers = BTreeMap<u32, Server>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) family: Family,
    pub(crate) scheduler: String,
    /// How long a client keeps its endpoint after its last connection, in seconds; 0 if it does not.
    pub(crate) persistence: u64,
    /// The weights of endpoints; those with 0 only keep their connections.
    pub(crate) weights: BTreeMap<SocketAddr, u32>,
}

impl Server {
    /// The options of `ipvsadm` that select it.
    fn selector(&self, mark: u32) -> String {
        format!("-f {mark}{}", if self.family == Family::V6 { " -6" } else { "" })
    }

    fn parameters(&self) -> String {
        let persistence = self.persistence;
        let persistence = if persistence > 0 { format!(" -p {persistence}") } else { String::new() };
        // Hashes keep the places of endpoints without a weight; otherwise their clients would be dropped.
        let hash = ["mh", "sh"].into_iter().find(|it| *it == self.scheduler);
        let fallback = hash.map_or_else(String::new, |it| format!(" -b {it}-fallback"));
        format!("-s {}{persistence}{fallback}", self.scheduler)
    }
}

/// The lines of `ipvsadm --restore`: those that add, before traffic is led to what they add, and those that remove, after.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Lines {
    pub(crate) first: Vec<String>,
    pub(crate) last: Vec<String>,
}

impl Lines {
    /// Adds what makes a virtual server what is wanted, and returns what it will be. An endpoint that goes keeps its connections
    /// if they can be drained.
    pub(crate) fn change(&mut self, mark: u32, old: Option<&Server>, new: Option<&Server>) -> Option<Server> {
        let at = old.or(new)?.selector(mark);
        let none = BTreeMap::new();
        let (had, wanted) = (old.map_or(&none, |it| &it.weights), new.map_or(&none, |it| &it.weights));
        let parameters = new.map(Server::parameters);
        match (old, &parameters) {
            (None, Some(parameters)) => self.first.push(format!("-A {at} {parameters}")),
            (Some(old), Some(parameters)) if old.parameters() != *parameters => {
                self.first.push(format!("-E {at} {parameters}"));
            }
            (Some(_), None) if had.is_empty() || !is_drained(mark) => {
                self.last.push(format!("-D {at}"));
                return None;
            }
            _ => {}
        }
        for (endpoint, weight) in wanted {
            let line = |verb| format!("{verb} {at} -r {endpoint} -m -w {weight}");
            match had.get(endpoint) {
                None => self.first.push(line("-a")),
                Some(it) if it != weight => self.first.push(line("-e")),
                Some(_) => {}
            }
        }
        let mut server = new.or(old)?.clone();
        for (endpoint, weight) in had.iter().filter(|(it, _)| !wanted.contains_key(it)) {
            if !is_drained(mark) {
                self.last.push(format!("-d {at} -r {endpoint}"));
                continue;
            }
            if *weight > 0 {
                self.last.push(format!("-e {at} -r {endpoint} -m -w 0"));
            }
            server.weights.insert(*endpoint, 0);
        }
        Some(server)
    }

    /// Adds what deletes endpoints without a weight and without connections, and virtual servers that are left without any, and
    /// returns what they will be.
    pub(crate) fn delete_drained(
        &mut self,
        servers: &Servers,
        connections: &Connections,
        is_wanted: impl Fn(u32) -> bool,
    ) -> Servers {
        let mut left = servers.clone();
        left.retain(|mark, server| {
            let at = server.selector(*mark);
            let is_idle = |it: &SocketAddr| !connections.contains_key(&(*mark, *it));
            let old = std::mem::take(&mut server.weights);
            let (gone, kept) = old.into_iter().partition(|(it, weight)| *weight == 0 && is_idle(it));
            let gone: BTreeMap<_, _> = gone;
            server.weights = kept;
            if server.weights.is_empty() && !is_wanted(*mark) {
                self.last.push(format!("-D {at}"));
                return false;
            }
            self.last.extend(gone.keys().map(|it| format!("-d {at} -r {it}")));
            true
        });
        left
    }
}

/// The endpoints of virtual servers that have connections, and how many.
pub(crate) type Connections = BTreeMap<(u32, SocketAddr), u64>;

/// Reads what `ipvsadm --list --numeric` prints; others' virtual servers are left out.
pub(crate) fn parse(list: &str) -> (Servers, Connections) {
    let (mut servers, mut connections) = (Servers::new(), Connections::new());
    let mut current = None;
    for line in list.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            ["->", endpoint, _, weight, active, inactive] => {
                let Some(mark) = current else { continue };
                let (Some(server), Ok(endpoint)) = (servers.get_mut(&mark), endpoint.parse()) else {
                    continue;
                };
                let number = |it: &str| it.parse::<u64>().unwrap_or(0);
                server.weights.insert(endpoint, u32::try_from(number(weight)).unwrap_or(u32::MAX));
                if number(active) + number(inactive) > 0 {
                    connections.insert((mark, endpoint), number(active) + number(inactive));
                }
            }
            ["FWM", mark, ref rest @ ..] => {
                current = mark.parse().ok().filter(|it| it & MASK == PREFIX);
                let Some(mark) = current else { continue };
                let family = if rest.contains(&"IPv6") { Family::V6 } else { Family::V4 };
                let mut rest = rest.iter().filter(|it| **it != "IPv6");
                let scheduler = rest.next().map_or_else(String::new, |it| (*it).to_owned());
                let persistence = rest.skip_while(|it| **it != "persistent").nth(1);
                let persistence = persistence.and_then(|it| it.parse().ok()).unwrap_or(0);
                servers.insert(mark, Server { family, scheduler, persistence, weights: BTreeMap::new() });
            }
            _ => current = None,
        }
    }
    (servers, connections)
}

pub(crate) fn deletion(servers: &Servers) -> Vec<String> {
    servers.iter().map(|(mark, it)| format!("-D {}", it.selector(*mark))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: u32 = PREFIX | 0b1001;
    const UDP: u32 = PREFIX | 0b1_0101;

    fn server(parameters: &str, weights: &[(&str, u32)]) -> Server {
        let (scheduler, persistence) = parameters.split_once(' ').unwrap_or((parameters, "0"));
        let weights = weights.iter().map(|(it, weight)| (it.parse().unwrap(), *weight)).collect();
        let family = Family::V4;
        Server { family, scheduler: scheduler.into(), persistence: persistence.parse().unwrap(), weights }
    }

    /// The lines of a change, without what all of them name, and what is left.
    fn change(mark: u32, old: Option<&Server>, new: Option<&Server>) -> ([String; 2], Option<Server>) {
        let mut lines = Lines::default();
        let left = lines.change(mark, old, new);
        let text = |it: &[String]| it.join(", ").replace(&format!(" -f {mark}"), "").replace(" -m", "");
        ([text(&lines.first), text(&lines.last)], left)
    }

    #[test]
    fn a_virtual_server_is_never_without_an_endpoint_and_connections_are_drained() {
        let [one, two] = ["10.1.0.1:80", "10.1.0.2:80"];
        let a = server("rr", &[(one, 1)]);
        let b = server("lc 60", &[(two, 1)]);
        let drained = server("rr", &[(one, 0)]);
        let hashed = server("mh", &[]);
        let cases = [
            (TCP, None, Some(&a), ["-A -s rr, -a -r 10.1.0.1:80 -w 1", ""], Some(a.clone())),
            (UDP, None, Some(&hashed), ["-A -s mh -b mh-fallback", ""], Some(hashed.clone())),
            (
                TCP,
                Some(&a),
                Some(&b),
                ["-E -s lc -p 60, -a -r 10.1.0.2:80 -w 1", "-e -r 10.1.0.1:80 -w 0"],
                Some(server("lc 60", &[(one, 0), (two, 1)])),
            ),
            (
                UDP,
                Some(&a),
                Some(&b),
                ["-E -s lc -p 60, -a -r 10.1.0.2:80 -w 1", "-d -r 10.1.0.1:80"],
                Some(b.clone()),
            ),
            (TCP, Some(&drained), Some(&a), ["-e -r 10.1.0.1:80 -w 1", ""], Some(a.clone())),
            (TCP, Some(&a), Some(&a), ["", ""], Some(a.clone())),
            (TCP, Some(&a), None, ["", "-e -r 10.1.0.1:80 -w 0"], Some(drained.clone())),
            (TCP, Some(&drained), None, ["", ""], Some(drained.clone())),
            (UDP, Some(&a), None, ["", "-D"], None),
        ];
        for (mark, old, new, lines, left) in cases {
            assert_eq!(change(mark, old, new), (lines.map(ToOwned::to_owned), left), "{old:?} to {new:?}");
        }
    }

    const LIST: &str = include_str!("servers/list.txt");

    #[test]
    fn only_servers_of_this_program_are_read_and_idle_ones_deleted() {
        let (servers, connections) = parse(LIST);
        let [v6, v4] = [1_795_162_121, 1_795_162_129];
        assert_eq!(servers.keys().copied().collect::<Vec<_>>(), [v6, v4]);
        let weights: Vec<_> = servers[&v6].weights.values().copied().collect();
        let Server { family, scheduler, persistence, .. } = &servers[&v6];
        assert_eq!((*family, &**scheduler, *persistence, weights), (Family::V6, "mh", 10_800, vec![0, 1, 0]));
        assert_eq!(servers[&v4], server("lc", &[("10.1.0.1:8080", 0)]));
        assert_eq!(connections, [((v6, "[fd00::1]:8080".parse().unwrap()), 3)].into());

        let mut lines = Lines::default();
        let left = lines.delete_drained(&servers, &connections, |it| it == v6);
        let expected = [format!("-d -f {v6} -6 -r [fd00::3]:8080"), format!("-D -f {v4}")];
        assert_eq!((&lines.first[..], &lines.last[..]), (&[][..], &expected[..]));
        assert_eq!(left.len(), 1);
        assert_eq!(left[&v6].weights.len(), 2);
    }
}
