//! What the kernel's numbers stand for: service ports, cgroups and times.

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use admin::Admin;
use anyhow::Result;
use datapath_ebpf::{self as ebpf, CgroupPaths, Counts, TraceEvent, pod_uid};
use jiff::{SignedDuration, Timestamp};
use model::{Protocol, ServiceName, state::ServicePort};
use nix::time::{ClockId, clock_gettime};
use publish::Published;

use super::line::{Decision, Line, Step};

/// How often the names of service ports are read again at most.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// The names, of which those of service ports follow the state that is served.
pub(super) struct Names {
    admin: Admin,
    pin_dir: PathBuf,
    pub(super) cgroups: CgroupPaths,
    /// Service and port, by the first counter of the service port.
    ports: HashMap<u32, (ServiceName, String)>,
    /// The state that they are of.
    state: Option<Arc<Published>>,
    read_at: Instant,
    /// The wall clock minus the monotonic clock.
    offset: SignedDuration,
}

impl Names {
    pub(super) fn read(admin: &Admin, options: &ebpf::Options) -> Result<Self> {
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
        let wall = Timestamp::now().as_duration();
        let mut names = Self {
            admin: admin.clone(),
            pin_dir: options.pin_dir.clone(),
            cgroups: CgroupPaths::open(options.cgroup.as_deref())?,
            ports: HashMap::new(),
            state: None,
            read_at: Instant::now(),
            offset: wall - SignedDuration::try_from(Duration::from(now))?,
        };
        names.read_ports()?;
        Ok(names)
    }

    fn read_ports(&mut self) -> Result<()> {
        self.read_at = Instant::now();
        let Some(state) = self.admin.served() else { return Ok(()) };
        let counts = ebpf::counts(&self.pin_dir)?;
        let ports = state.state.services.iter().flat_map(|(name, it)| {
            let ports = it.service.ports.iter().map(move |it| (name, it));
            ports.filter_map(|(name, it)| {
                let counter = Counts::first_counter(&counts, name, &it.name, it.protocol)?;
                Some((counter, (name.clone(), port_label(it))))
            })
        });
        self.ports = ports.collect();
        self.state = Some(state);
        Ok(())
    }

    /// Reads the names of service ports again if another state is served; returns whether they were read.
    pub(super) fn refresh(&mut self) -> bool {
        if self.read_at.elapsed() < READ_INTERVAL {
            return false;
        }
        let is_other = |it: Arc<Published>| self.state.as_ref().is_none_or(|known| !Arc::ptr_eq(known, &it));
        // The next attempt follows soon.
        self.admin.served().is_some_and(is_other) && self.read_ports().is_ok()
    }

    /// The counters of the ports of a Service.
    pub(super) fn ports_of(&self, service: &ServiceName) -> Vec<u32> {
        let own = self.ports.iter().filter(|(_, (name, _))| name == service);
        own.map(|(counter, _)| *counter).collect()
    }

    /// Why a destination that no Service has is a cluster IP nevertheless; none if it is no cluster IP.
    pub(super) fn cluster_ip_failure(&self, destination: SocketAddr, protocol: u8) -> Option<String> {
        let state = &self.state.as_ref()?.state;
        let ip = destination.ip();
        let owner = state.services.values().find(|it| it.service.cluster_ips.contains(&ip));
        let Some(owner) = owner else {
            let is_in_range =
                state.service_cidrs.values().any(|it| it.cidrs.iter().any(|it| it.contains(&ip)));
            return is_in_range.then(|| "no Service has this cluster IP".into());
        };
        let protocol = self::protocol(protocol);
        let ports: Vec<_> =
            owner.service.ports.iter().map(|it| format!("{}/{}", it.port, it.protocol)).collect();
        let is_own = ports.contains(&format!("{}/{protocol}", destination.port()));
        let name = &owner.service.name;
        (!is_own).then(|| format!("{name} has no such port: it has {}", ports.join(", ")))
    }

    /// The line of an event, with the steps of its decision.
    pub(super) fn line(&mut self, event: TraceEvent, reason: Option<String>) -> Line {
        let cgroup = self.cgroups.get(event.cgroup).map(ToOwned::to_owned);
        let names = event.port_counter.and_then(|it| self.ports.get(&it));
        // The end of a connection has the time of the end.
        let time = event.time + event.end.map_or(Duration::ZERO, |it| it.after);
        let since_epoch = SignedDuration::try_from(time).unwrap_or_default() + self.offset;
        let decision = Decision {
            time: Timestamp::from_duration(since_epoch).unwrap_or_default(),
            pid: event.pid,
            process: event.process,
            pod_uid: cgroup.as_deref().and_then(pod_uid),
            pod: None,
            cgroup,
            netns: event.netns,
            protocol: protocol(event.protocol),
            destination: event.destination,
            service: names.map(|(service, _)| service.to_string()),
            port: names.map(|(_, port)| port.clone()),
            verdict: event.verdict,
            reason,
            endpoint: event.endpoint,
            choice: event.choice,
            end: event.end.map(|it| it.how),
            established_seconds: event.end.and_then(|it| it.established).map(|it| it.as_secs_f64()),
            seconds: event.end.map(|it| it.after.as_secs_f64()),
            steps: event.steps.into_iter().map(Step::from).collect(),
        };
        match (decision.end, event.is_connect) {
            (Some(_), _) => Line::End(decision),
            (None, true) => Line::Connect(decision),
            (None, false) => Line::Send(decision),
        }
    }
}

/// The name of a port, or its number.
pub(super) fn port_label(port: &ServicePort) -> String {
    if port.name.is_empty() { port.port.to_string() } else { port.name.clone() }
}

/// The name of an IP protocol number.
pub(super) fn protocol(number: u8) -> String {
    Protocol::of_number(number).map_or_else(|| number.to_string(), |it| it.to_string())
}
