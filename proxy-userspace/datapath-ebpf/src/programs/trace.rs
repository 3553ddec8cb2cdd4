//! The traced variant of the programs: loaded with the filters of a trace, and put under the links while it runs.
//!
//! Invariant: it uses the maps of the product's programs, and decides as they do. The product's programs return when the
//! trace is dropped, and at the next start if the process dies before.

use std::{
    mem,
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    path::PathBuf,
    thread,
    time::Duration,
};

use aya::{
    Ebpf,
    maps::{Array, MapData, RingBuf},
    programs::Program,
};
use log::Level;
use proxy_common::{
    counters::{CounterIndex, NO_COUNTER},
    net::{SockAddr, V6},
    trace::{self as raw, Event, MAX_PORTS},
};
use serde::{Deserialize, Serialize};

use crate::{
    error::Error,
    host::{capabilities, raw_bpf},
    maps::{
        bpf_maps, embedded,
        exclusions::{self, Exclusions},
        features::with_features,
        map_spec,
        pins::{self, Pins},
        program_log::{TraceStep, TraceSteps},
        tracked_map::TrackedMap,
    },
    options::Options,
    programs::{
        hooks,
        links::{self, failed},
    },
};

/// The hooks whose programs differ; those that end or watch a connection come before those that begin one.
const HOOKS: [&str; 6] = ["sock_release", "sock_ops", "sendmsg4", "sendmsg6", "connect4", "connect6"];

/// How many events are read at once.
const MAX_EVENTS: usize = 64;
/// What a program takes at most to write a line, unless it is preempted.
const LINE_TIME: Duration = Duration::from_millis(1);

/// What is traced; by default every decision on a destination in a network of Services.
#[derive(Clone, Debug, Default)]
pub struct TraceFilter {
    /// Only these service ports, by their counters ([`Counts::first_counter`](crate::Counts::first_counter)).
    pub ports: Option<Vec<CounterIndex>>,
    /// Only this destination or endpoint; port 0 stands for every port.
    pub address: Option<SocketAddr>,
    /// Only this process.
    pub pid: Option<u32>,
    /// Only the processes in this cgroup and below.
    pub cgroup: Option<PathBuf>,
    /// Only the network namespace with this cookie.
    pub netns: Option<u64>,
    /// Only what fails, and what is not redirected in networks of Services.
    pub failed_only: bool,
    /// Connections are reported again when they end.
    pub ends: bool,
    /// Destinations in other networks, too, and each datagram.
    pub all: bool,
    /// The steps of each decision, too, as lines up to this level; those of the ends of sockets are at level trace.
    pub steps: Option<Level>,
}

/// The programs of a trace, and the links that they are under; dropping it puts the product's programs there again.
pub struct TracedPrograms {
    ebpf: Ebpf,
    excluded: TrackedMap<u64>,
    replaced: Vec<Replaced>,
}

/// A link with the program of a trace.
struct Replaced {
    hook: &'static str,
    link: OwnedFd,
    product: OwnedFd,
}

/// What the programs of a trace report.
pub struct TraceEvents {
    events: RingBuf<MapData>,
    lost: Array<MapData, u64>,
    steps: Option<TraceSteps>,
    /// Whether sockets say lines when they end.
    has_end_steps: bool,
    /// Why there are no steps, although they were asked for.
    pub refused_steps: Option<Error>,
    ports: TrackedMap<CounterIndex>,
}

/// One decision, or the end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// When the decision was made, by the monotonic clock.
    pub time: Duration,
    /// The cookie of the socket.
    pub socket: u64,
    pub pid: u32,
    /// The name of the process.
    pub process: String,
    /// The id of the cgroup of the process.
    pub cgroup: u64,
    /// The cookie of the network namespace.
    pub netns: u64,
    /// Whether the call was a connect; else it was a datagram of an unconnected socket.
    pub is_connect: bool,
    pub protocol: u8,
    /// The destination that the process asked for.
    pub destination: SocketAddr,
    /// The endpoint that replaced it.
    pub endpoint: Option<SocketAddr>,
    /// The first counter of the service port.
    pub port_counter: Option<CounterIndex>,
    pub verdict: TraceVerdict,
    pub choice: TraceChoice,
    /// How the connection ended, if that is what is reported.
    pub end: Option<TraceEnd>,
    /// What the program did before, if that was asked for.
    pub steps: Vec<TraceStep>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TraceVerdict {
    /// The destination is no frontend.
    Passed,
    Excluded,
    /// The call is left to the packet path.
    LeftToPackets,
    Redirected,
    /// The Service has no endpoints.
    NoEndpoints,
    /// There is no room for the translation.
    NoRoom,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceChoice {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<TraceAffinity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ejected: Option<TraceEjection>,
    /// Whether the endpoint with fewer connections was used.
    #[serde(default, skip_serializing_if = "is_false")]
    pub least_connections: bool,
    /// Whether new endpoints get fewer connections.
    #[serde(default, skip_serializing_if = "is_false")]
    pub slow_start: bool,
    /// Whether it is a further datagram to the same endpoint.
    #[serde(default, skip_serializing_if = "is_false")]
    pub further_datagram: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_false(it: &bool) -> bool {
    !it
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TraceAffinity {
    /// The client has kept its endpoint.
    Kept,
    /// The client keeps this endpoint from now on.
    New,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TraceEjection {
    /// An ejected endpoint was avoided.
    Avoided,
    /// The endpoint was ejected and is tried, as its time is over or there is no other one.
    Tried,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEnd {
    pub how: EndReason,
    /// How long after the decision it was established, if that was seen.
    pub established: Option<Duration>,
    /// How long after the decision it ended.
    pub after: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EndReason {
    /// The process closed it.
    Closed,
    /// The endpoint closed it first.
    ClosedByEndpoint,
    /// It was reset after it was established, or timed out.
    Reset,
    Refused,
    NoAnswer,
    /// The process closed the socket before the endpoint had answered.
    GivenUp,
}

impl TracedPrograms {
    /// Loads the traced variant on the pinned maps; without steps if the kernel refuses those. Nothing is attached.
    ///
    /// # Errors
    ///
    /// If this binary has no such variant, the kernel refuses it, or the cgroup of the filter does not exist.
    pub fn load(options: &Options, filter: &TraceFilter) -> Result<(Self, TraceEvents), Error> {
        let object = embedded::traced()?;
        let pins = Pins::new(&options.pin_dir);
        let globals = globals(filter)?;
        let load = |log_level| {
            with_features(|features| {
                let mut ebpf = bpf_maps::load_object(&pins, options, features, object, &globals, log_level)?;
                HOOKS.into_iter().try_for_each(|hook| hooks::load_program(&mut ebpf, hook))?;
                Ok(ebpf)
            })
        };
        let (mut ebpf, log_level, refused_steps) = with_fewer_lines(filter.steps, load)?;
        let excluded = TrackedMap::take(&mut ebpf, exclusions::MAP)?;
        let mut events = TraceEvents {
            events: map_spec::take(&mut ebpf, "EVENTS")?,
            lost: map_spec::take(&mut ebpf, "LOST")?,
            steps: log_level.map(|_| TraceSteps::take(&mut ebpf)).transpose()?,
            has_end_steps: log_level == Some(Level::Trace),
            refused_steps,
            ports: TrackedMap::take(&mut ebpf, "PORTS")?,
        };
        if let Some(ports) = &filter.ports {
            events.set_ports(ports)?;
        }
        Ok((Self { ebpf, excluded, replaced: Vec::new() }, events))
    }

    /// Replaces the programs at the pinned links, which may be others than before.
    ///
    /// # Errors
    ///
    /// The product's programs are under all links.
    pub(crate) fn put(&mut self, product: &mut Ebpf, pins: &Pins) -> Result<(), Error> {
        self.take_back();
        let result = HOOKS.into_iter().try_for_each(|hook| {
            let pin = pins.links().join(hook);
            // One hook may have no program, see `hooks::OPTIONAL`.
            let Some(link) = pins::open(&pin)? else { return Ok(()) };
            let duplicate = |program: &mut Program| {
                let fd = program.fd().map_err(failed("open", hook))?.as_fd().try_clone_to_owned();
                fd.map_err(Error::syscall("dup", format!("the program of {hook}")))
            };
            let product = duplicate(hooks::program(product, hook)?)?;
            let traced = duplicate(hooks::program(&mut self.ebpf, hook)?)?;
            links::update(&link, &traced, &pin)?;
            self.replaced.push(Replaced { hook, link, product });
            Ok(())
        });
        if result.is_err() {
            self.take_back();
        }
        result
    }

    /// Puts the product's programs under the links.
    fn take_back(&mut self) {
        // Those that begin connections first.
        for Replaced { hook, link, product } in self.replaced.drain(..).rev() {
            if let Err(error) = raw_bpf::link_update(link.as_fd(), product.as_fd()) {
                tracing::error!(
                    "the traced program stays attached at {hook}, which costs some time; the next start replaces it: \
                     {error}"
                );
            }
        }
    }

    pub(crate) fn set_exclusions(&mut self, exclusions: &Exclusions) -> Result<(), Error> {
        self.excluded.mirror(&exclusions.map)
    }
}

impl Drop for TracedPrograms {
    fn drop(&mut self) {
        self.take_back();
    }
}

/// Loads programs with lines of log up to a level, or without any if the kernel has no room for them: returns the level, and why
/// it is another one.
fn with_fewer_lines<T>(
    level: Option<Level>,
    load: impl Fn(Option<Level>) -> Result<T, Error>,
) -> Result<(T, Option<Level>, Option<Error>), Error> {
    match load(level) {
        Err(error @ Error::Program { .. }) if level.is_some() && !capabilities::is_any_missing() => {
            Ok((load(None)?, None, Some(error)))
        }
        loaded => Ok((loaded?, level, None)),
    }
}

fn globals(filter: &TraceFilter) -> Result<Vec<(&'static str, u64)>, Error> {
    let address = filter.address.map(SockAddr::from).unwrap_or_default();
    let [a, b, c, d] = V6::raw(address.ip).map(u64::from);
    let (cgroup, levels) = match &filter.cgroup {
        Some(path) => exclusions::id_and_levels(path)?,
        None => (0, 0),
    };
    Ok(vec![
        ("BY_PORT", filter.ports.is_some().into()),
        ("PID", filter.pid.unwrap_or(0).into()),
        ("CGROUP_LEVELS", levels.into()),
        ("CGROUP", cgroup),
        ("NETNS", filter.netns.unwrap_or(0)),
        ("BY_ADDRESS", filter.address.is_some().into()),
        ("ADDRESS0", a),
        ("ADDRESS1", b),
        ("ADDRESS2", c),
        ("ADDRESS3", d),
        ("PORT", address.port.raw().into()),
        ("FAILED_ONLY", filter.failed_only.into()),
        ("ENDS", (filter.ends || filter.failed_only || filter.steps == Some(Level::Trace)).into()),
        ("ALL", filter.all.into()),
    ])
}

impl TraceEvents {
    /// Reads events with their steps; and whether there may be more.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn read(&mut self) -> Result<(Vec<TraceEvent>, bool), Error> {
        let mut events = Vec::new();
        while events.len() < MAX_EVENTS
            && let Some(item) = self.events.next()
        {
            events.extend(bytemuck::try_pod_read_unaligned::<Event>(&item).ok().map(TraceEvent::from));
        }
        let is_more = events.len() == MAX_EVENTS;
        let Some(steps) = &mut self.steps else { return Ok((events, is_more)) };
        // The lines of a decision come before its event.
        steps.read(is_more)?;
        let mut has_waited = false;
        for event in &mut events {
            let until = if event.end.is_some() { u64::MAX } else { event.time.as_nanos() as u64 };
            let mut found = steps.take_decision(event.socket, until);
            let may_follow = event.end.is_none() || self.has_end_steps;
            if found.is_none() && may_follow && !mem::replace(&mut has_waited, true) {
                // A line that another CPU is writing holds up those behind it.
                thread::sleep(LINE_TIME);
                steps.read(is_more)?;
                found = steps.take_decision(event.socket, until);
            }
            event.steps = found.unwrap_or_default();
        }
        Ok((events, is_more))
    }

    /// How many lines of steps were lost because they were not read in time.
    pub fn lost_steps(&self) -> u64 {
        self.steps.as_ref().map_or(0, TraceSteps::lost)
    }

    /// How many events were lost because they were not read in time.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn lost(&self) -> Result<u64, Error> {
        self.lost.get(&0, 0).map_err(Error::map("LOST"))
    }

    /// Restricts a trace that was started with service ports to these.
    ///
    /// # Errors
    ///
    /// If there are too many.
    pub fn set_ports(&mut self, ports: &[CounterIndex]) -> Result<(), Error> {
        if ports.len() > MAX_PORTS as usize {
            return Err(Error::TooManyTracedPorts(ports.len()));
        }
        self.ports.set(ports.iter().map(|it| (*it, 1)).collect())
    }
}

impl From<Event> for TraceEvent {
    fn from(it: Event) -> Self {
        let name = it.process.split(|it| *it == 0).next().unwrap_or_default();
        let has = |note| it.notes & note != 0;
        let time = Duration::from_nanos(it.time);
        let since = |at| Duration::from_nanos(at).saturating_sub(time);
        let end = end_reason(it.end).map(|how| TraceEnd {
            how,
            established: (it.established != 0).then(|| since(it.established)),
            after: since(it.ended),
        });
        let affinity = if has(raw::AFFINITY_KEPT) { TraceAffinity::Kept } else { TraceAffinity::New };
        let ejected = has(raw::EJECTED_AVOIDED).then_some(TraceEjection::Avoided);
        let ejected = ejected.or(has(raw::EJECTED_TRIED).then_some(TraceEjection::Tried));
        Self {
            time,
            socket: it.socket,
            pid: it.pid,
            process: String::from_utf8_lossy(name).into_owned(),
            cgroup: it.cgroup,
            netns: it.netns,
            is_connect: it.call == raw::CONNECT,
            protocol: it.protocol,
            destination: it.destination.into(),
            endpoint: (!it.backend.is_unset()).then(|| it.backend.into()),
            port_counter: Some(it.port_counter).filter(|it| *it != NO_COUNTER),
            verdict: verdict(it.verdict),
            choice: TraceChoice {
                affinity: has(raw::AFFINITY).then_some(affinity),
                ejected,
                least_connections: has(raw::LEAST_CONNECTIONS),
                slow_start: has(raw::SLOW_START),
                further_datagram: has(raw::FURTHER_DATAGRAM),
            },
            end,
            steps: Vec::new(),
        }
    }
}

fn verdict(raw: u8) -> TraceVerdict {
    match raw {
        raw::EXCLUDED => TraceVerdict::Excluded,
        raw::LEFT_TO_PACKETS => TraceVerdict::LeftToPackets,
        raw::REDIRECTED => TraceVerdict::Redirected,
        raw::NO_BACKENDS => TraceVerdict::NoEndpoints,
        raw::NO_ROOM => TraceVerdict::NoRoom,
        _ => TraceVerdict::Passed,
    }
}

fn end_reason(raw: u8) -> Option<EndReason> {
    Some(match raw {
        raw::CLOSED => EndReason::Closed,
        raw::CLOSED_BY_BACKEND => EndReason::ClosedByEndpoint,
        raw::RESET => EndReason::Reset,
        raw::REFUSED => EndReason::Refused,
        raw::NO_ANSWER => EndReason::NoAnswer,
        raw::GIVEN_UP => EndReason::GivenUp,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_room_for_lines_the_programs_are_loaded_without() {
        let refusal = || Error::Program { call: "load", program: "connect6", source: "too large".into() };
        let roomy = |level| Ok(level);
        let (loaded, level, refused) = with_fewer_lines(Some(Level::Debug), roomy).unwrap();
        assert!(loaded == level && level == Some(Level::Debug) && refused.is_none());
        let cramped = |level: Option<Level>| level.map_or(Ok(()), |_| Err(refusal()));
        let (_, level, refused) = with_fewer_lines(Some(Level::Trace), cramped).unwrap();
        assert!(level.is_none() && refused.unwrap().to_string().contains("connect6"));
        assert!(with_fewer_lines(None, |_| Err::<(), _>(refusal())).is_err());
        let broken = |_| Err::<(), _>(Error::NoTracedPrograms);
        assert!(with_fewer_lines(Some(Level::Trace), broken).is_err());
    }

    #[test]
    fn an_event_is_read_as_it_was_written() {
        let second = 1_000_000_000;
        let mut event = Event {
            time: 5 * second,
            destination: SocketAddr::from(([10, 96, 0, 1], 80)).into(),
            backend: "[fd00::1]:8080".parse::<SocketAddr>().unwrap().into(),
            port_counter: 8,
            verdict: raw::REDIRECTED,
            call: raw::CONNECT,
            notes: raw::AFFINITY | raw::EJECTED_AVOIDED | raw::EJECTED_TRIED,
            end: raw::REFUSED,
            ended: 7 * second,
            ..Event::default()
        };
        event.process[..4].copy_from_slice(b"curl");
        let read = TraceEvent::from(event);
        assert_eq!((read.process.as_str(), read.is_connect, read.port_counter), ("curl", true, Some(8)));
        assert_eq!(read.destination, "10.96.0.1:80".parse().unwrap());
        assert_eq!(read.endpoint, Some("[fd00::1]:8080".parse().unwrap()));
        let after = Duration::from_secs(2);
        assert_eq!(read.end, Some(TraceEnd { how: EndReason::Refused, established: None, after }));
        let (affinity, ejected) = (Some(TraceAffinity::New), Some(TraceEjection::Avoided));
        assert_eq!(read.choice, TraceChoice { affinity, ejected, ..TraceChoice::default() });
        let other =
            TraceEvent::from(Event { port_counter: NO_COUNTER, verdict: raw::EXCLUDED, ..Event::default() });
        assert_eq!((other.endpoint, other.port_counter, other.end), (None, None, None));
        assert_eq!(other.verdict, TraceVerdict::Excluded);
    }
}
