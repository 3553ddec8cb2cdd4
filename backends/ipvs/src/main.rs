//! A service proxy that programs IPVS, for users of kube-proxy's mode `ipvs`.
//!
//! An nftables table leads traffic by its destination to a mark, a policy route makes the address of marked packets local, and
//! IPVS has one virtual server per mark. So a virtual server has any number of addresses and node ports, traffic from inside and
//! from outside may have different ones, and no interface has the addresses of Services: a port without a Service is not open
//! just because the node listens at it.
//!
//! Invariant: a mark in the table has a virtual server. What is added comes before the table, what is removed after it.

mod marks;
mod plan;
mod servers;
mod table;
mod tools;

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    sync::Arc,
};

use clap::{Parser, builder::PossibleValuesParser};
use ipnet::IpNet;
use proxy_contract::{
    backend::{self, Backend, Changed, Flags, NotServed},
    client::State,
    localv1::Extension,
};

use crate::{
    marks::Marks,
    plan::{Defaults, Elements, Plan, Plans, SCHEDULERS, plan},
    servers::{Lines, Server, Servers},
    tools::Error,
};

/// A service proxy that programs IPVS.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    #[command(flatten)]
    flags: Flags,
    /// The scheduler of Services that have none by the annotation kube-proxy-ebpf.io/ipvs-scheduler
    #[arg(long, value_name = "NAME", default_value = "rr", value_parser = PossibleValuesParser::new(SCHEDULERS))]
    scheduler: String,
    /// Ranges of the node's addresses with node ports [default: all but loopback]
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    nodeport_addresses: Vec<IpNet>,
    /// Remove everything that this program has made from the kernel, and end
    #[arg(long)]
    cleanup: bool,
}

/// The plans of Services that changed; `None` for those that are gone.
type Changes = BTreeMap<Arc<str>, Option<Plan>>;

struct Ipvs {
    flags: Flags,
    nodes: Vec<IpNet>,
    defaults: Defaults,
    /// The schedulers that the kernel is known to have.
    schedulers: BTreeSet<String>,
    /// Ranges of sources inside the cluster.
    sources: Vec<IpNet>,
    plans: Plans,
    marks: Marks,
    servers: Servers,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Arguments { flags, scheduler, nodeport_addresses: nodes, cleanup } = Arguments::parse();
    if cleanup {
        return backend::exit_code(clean_up().await);
    }
    let mut ipvs = Ipvs {
        flags: flags.clone(),
        nodes,
        defaults: Defaults { scheduler, missing: BTreeSet::new() },
        schedulers: BTreeSet::new(),
        sources: Vec::new(),
        plans: Plans::new(),
        marks: Marks::default(),
        servers: Servers::new(),
    };
    backend::main(&flags, &mut ipvs).await
}

/// Removes the table first: without marks, no traffic comes to the virtual servers.
async fn clean_up() -> Result<(), Error> {
    tools::nft(&table::deletion()).await?;
    tools::delete_routes().await?;
    match tools::list_servers().await {
        Ok((servers, _)) => tools::restore(&servers::deletion(&servers)).await,
        // A kernel without IPVS has no virtual servers.
        Err(Error::NoIpvs) => Ok(()),
        Err(error) => Err(error),
    }
}

impl Backend for Ipvs {
    const EXTENSIONS: &[Extension] = &[Extension::Nodes];
    type Error = Error;

    async fn apply(&mut self, state: &State, changed: Changed<'_>) -> Result<Vec<NotServed>, Error> {
        let sources = self.sources_of(state);
        let is_whole = changed == Changed::Everything || sources != self.sources;
        if is_whole {
            self.begin_anew().await?;
            self.sources = sources;
        }
        let names: BTreeSet<_> = match changed {
            Changed::Services(it) if !is_whole => it.clone(),
            _ => state.services.keys().chain(self.plans.keys()).cloned().collect(),
        };
        let plans = self.plan(state, &names).await?;
        let (lines, servers) = self.lines(&plans, is_whole);
        tools::restore(&lines.first).await?;
        self.write_table(&plans, is_whole).await?;
        tools::restore(&lines.last).await?;
        self.commit(plans, servers);
        Ok(self.not_served())
    }

    async fn is_intact(&mut self) -> Result<bool, Error> {
        let (servers, connections) = tools::list_servers().await?;
        let listing = tools::list_table().await?;
        let elements = self.plans.values().map(|it| &it.elements);
        let found = [
            ("virtual servers", servers == self.servers),
            ("nftables table", listing.has(elements)),
            ("policy routes", tools::has_routes().await?),
        ];
        let changed: Vec<_> = found.iter().filter(|(_, is_intact)| !is_intact).map(|(it, _)| *it).collect();
        if !changed.is_empty() {
            tracing::warn!(changed = changed.join(", "), "foreign change");
            return Ok(false);
        }
        let wanted: BTreeSet<_> = self.plans.values().flat_map(|it| it.servers.keys()).collect();
        let mut lines = Lines::default();
        let left = lines.delete_drained(&servers, &connections, |it| wanted.contains(&it));
        tools::restore(&lines.last).await?;
        self.servers = left;
        self.marks.taken = self.servers.keys().copied().collect();
        Ok(true)
    }
}

impl Ipvs {
    /// The ranges inside the cluster: those of the flag, or the pod ranges of the nodes.
    fn sources_of(&self, state: &State) -> Vec<IpNet> {
        if !self.flags.cluster_cidr.is_empty() {
            return self.flags.cluster_cidr.clone();
        }
        let ranges = state.nodes.values().flat_map(|it| &it.pod_cidrs);
        ranges.filter_map(|it| it.parse().ok()).collect()
    }

    /// Sets what IPVS needs, and reads what the kernel has, such as of a former process.
    async fn begin_anew(&mut self) -> Result<(), Error> {
        self.servers = tools::list_servers().await?.0;
        tools::set()?;
        tools::add_routes().await?;
        let planned = self.plans.values().flat_map(|it| it.servers.keys());
        self.marks.taken = self.servers.keys().chain(planned).copied().collect();
        if self.plans.is_empty() {
            self.marks.found = tools::list_table().await?.marks;
        }
        Ok(())
    }

    /// The plans of Services, without the schedulers that the kernel does not have.
    async fn plan(&mut self, state: &State, names: &BTreeSet<Arc<str>>) -> Result<Changes, Error> {
        self.check_scheduler(&self.defaults.scheduler.clone()).await?;
        let mut plans: Changes = BTreeMap::new();
        loop {
            for name in names {
                let before = plans.get(name).and_then(Option::as_ref).or_else(|| self.plans.get(name));
                let new = state.services.get(name);
                let new = new.map(|it| plan(it, &self.defaults, &mut self.marks, before));
                plans.insert(Arc::clone(name), new);
            }
            let used = plans.values().flatten().flat_map(|it| it.servers.values());
            let used: BTreeSet<_> = used.map(|it| it.scheduler.clone()).collect();
            let missing = self.defaults.missing.len();
            for it in used {
                self.check_scheduler(&it).await?;
            }
            if self.defaults.missing.len() == missing {
                return Ok(plans);
            }
        }
    }

    async fn check_scheduler(&mut self, name: &str) -> Result<(), Error> {
        if self.schedulers.contains(name) {
            return Ok(());
        }
        if tools::has_scheduler(name).await? {
            self.schedulers.insert(name.to_owned());
        } else if name == self.defaults.scheduler {
            return Err(Error::NoScheduler(name.to_owned()));
        } else {
            self.defaults.missing.insert(name.to_owned());
        }
        Ok(())
    }

    /// The lines that make virtual servers what plans want, and what these will be.
    fn lines(&self, plans: &Changes, is_whole: bool) -> (Lines, Vec<(u32, Option<Server>)>) {
        // In the order of names, so that the state is whole once its last Service is.
        let mut wanted = Vec::new();
        for (name, new) in plans {
            let new = new.as_ref().map(|it| &it.servers);
            let is_gone = |it: &u32| !new.is_some_and(|new| new.contains_key(it));
            let old = self.plans.get(name).into_iter().flat_map(|it| it.servers.keys());
            wanted.extend(old.copied().filter(is_gone).map(|it| (it, None)));
            wanted.extend(new.into_iter().flatten().map(|(mark, it)| (*mark, Some(it))));
        }
        if is_whole {
            let known: BTreeSet<_> = wanted.iter().map(|(it, _)| *it).collect();
            let others = self.servers.keys().filter(|it| !known.contains(it));
            wanted.splice(..0, others.map(|it| (*it, None)).collect::<Vec<_>>());
        }
        let mut lines = Lines::default();
        let servers = wanted.into_iter().map(|(mark, wanted)| {
            let old = self.servers.get(&mark);
            (mark, lines.change(mark, old, wanted))
        });
        let servers = servers.collect();
        (lines, servers)
    }

    async fn write_table(&self, plans: &Changes, is_whole: bool) -> Result<(), Error> {
        let new = plans.values().flatten().map(|it| &it.elements);
        if is_whole {
            return tools::nft(&table::whole(&self.sources, &self.nodes, new)).await;
        }
        let all = |it: &Plan| it.elements.clone();
        let mut old: Elements = plans.keys().filter_map(|it| self.plans.get(it)).flat_map(all).collect();
        let mut new: Elements = new.flatten().map(|(key, value)| (key.clone(), value.clone())).collect();
        let same: Elements = old.extract_if(.., |key, value| new.get(key) == Some(&*value)).collect();
        new.retain(|key, _| !same.contains_key(key));
        let text = table::difference(&old, &new);
        if text.is_empty() { Ok(()) } else { tools::nft(&text).await }
    }

    fn commit(&mut self, plans: Changes, servers: Vec<(u32, Option<Server>)>) {
        for (name, plan) in plans {
            match plan {
                Some(it) => self.plans.insert(name, it),
                None => self.plans.remove(&name),
            };
        }
        for (mark, server) in servers {
            match server {
                Some(it) => self.servers.insert(mark, it),
                None => self.servers.remove(&mark),
            };
        }
        self.marks.found.clear();
    }

    fn not_served(&self) -> Vec<NotServed> {
        let all = self.plans.iter().flat_map(|(name, it)| it.not_served.iter().map(move |it| (name, it)));
        all.map(|(service, reason)| NotServed { service: Arc::clone(service), reason: reason.clone() })
            .collect()
    }
}
