//! Which Events to post at Services: the difference between their problems and what was posted, at a bounded rate.
//!
//! Invariant: what has to wait is compared again when it is its turn, so that only what still holds is posted, once.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    time::Duration,
};

use model::ServiceName;
use source::kube::ServiceEvent;
use tokio::time::Instant;

/// The shortest time between two Events of the same reason at a Service.
const SERVICE_INTERVAL: Duration = Duration::from_secs(60);
/// How many Events of all Services may be posted at once, and how often one more.
const MAX_BURST: u32 = 10;
const REFILL_INTERVAL: Duration = Duration::from_secs(10);
/// How many endpoints an Event names.
const MAX_NAMED: usize = 5;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Problems {
    /// The annotations that are ignored, and why.
    pub(super) annotations: BTreeSet<String>,
    /// Why it does not fit into its namespace, if it does not.
    pub(super) over_limit: Option<String>,
    /// The endpoints that clients of this node avoid.
    pub(super) ejected: BTreeSet<String>,
}

/// What an Event is about.
#[derive(Clone, Copy, Debug)]
enum Reason {
    InvalidAnnotation,
    NamespaceOverLimit,
    EndpointEjected,
    EndpointReturned,
}

/// What was posted at a Service.
#[derive(Debug, Default)]
struct Posted {
    /// The problems that readers of the Events know.
    problems: Problems,
    /// When there was an Event of each reason.
    at: [Option<Instant>; 4],
}

/// Selects the Events of a node.
#[derive(Debug)]
pub(super) struct ServiceEvents {
    node: String,
    posted: BTreeMap<ServiceName, Posted>,
    /// The Service that had an Event last; the next ones have priority.
    last: ServiceName,
    /// How many Events may be posted now, and since when that is so.
    tokens: u32,
    refilled_at: Instant,
    /// Whether Services had to wait for others.
    is_late: bool,
}

impl ServiceEvents {
    pub(super) fn new(node: String, now: Instant) -> Self {
        Self {
            node,
            posted: BTreeMap::new(),
            last: ServiceName::default(),
            tokens: MAX_BURST,
            refilled_at: now,
            is_late: false,
        }
    }

    /// The Events to post now. `exists` says whether a Service still does.
    pub(super) fn update(
        &mut self,
        mut problems: BTreeMap<ServiceName, Problems>,
        exists: impl Fn(&ServiceName) -> bool,
        now: Instant,
    ) -> Vec<ServiceEvent> {
        self.refill(now);
        let names: BTreeSet<_> = self.posted.keys().chain(problems.keys()).cloned().collect();
        let mut names: Vec<_> = names.into_iter().collect();
        let first = names.partition_point(|it| *it <= self.last);
        names.rotate_left(first);
        let (mut events, mut late) = (Vec::new(), 0);
        for service in names {
            let mut posted = self.posted.remove(&service).unwrap_or_default();
            let current = problems.remove(&service).unwrap_or_default();
            if !exists(&service) {
                posted.problems.ejected.clear();
            }
            let has_waited = self.compare(&service, &mut posted, current, now, &mut events);
            late += usize::from(has_waited);
            let is_recent = posted.at.iter().flatten().any(|it| now - *it < SERVICE_INTERVAL);
            if is_recent || posted.problems != Problems::default() {
                self.posted.insert(service, posted);
            }
        }
        if let Some(it) = events.last() {
            self.last = it.service.clone();
        }
        let was_late = mem::replace(&mut self.is_late, late > 0);
        if self.is_late && !was_late {
            tracing::info!(
                "Events about {} have to wait, of which there is one every {REFILL_INTERVAL:?}; \
                 `status` lists what they are about",
                model::counted(late, "Service")
            );
        }
        events
    }

    /// Adds the Events of a Service; returns whether it has to wait for others.
    fn compare(
        &mut self,
        service: &ServiceName,
        posted: &mut Posted,
        current: Problems,
        now: Instant,
        events: &mut Vec<ServiceEvent>,
    ) -> bool {
        let Posted { problems, at } = posted;
        let mut has_waited = false;
        let mut post = |reason: Reason, note: String| {
            let at = &mut at[reason as usize];
            if at.is_some_and(|it| now - it < SERVICE_INTERVAL) {
                return false;
            }
            let may_post = self.tokens > 0;
            if may_post {
                self.tokens -= 1;
                *at = Some(now);
                events.push(event(service.clone(), reason, note));
            }
            has_waited |= !may_post;
            may_post
        };
        // All of them, so that every node posts the same.
        if current.annotations.is_subset(&problems.annotations)
            || post(Reason::InvalidAnnotation, Vec::from_iter(current.annotations.clone()).join("; "))
        {
            problems.annotations = current.annotations;
        }
        let is_known = current.over_limit.is_none() || current.over_limit == problems.over_limit;
        if is_known || post(Reason::NamespaceOverLimit, current.over_limit.clone().unwrap_or_default()) {
            problems.over_limit = current.over_limit;
        }
        let node = &self.node;
        let new: BTreeSet<_> = current.ejected.difference(&problems.ejected).cloned().collect();
        if !new.is_empty() {
            let note = format!(
                "connections from node {node} fail, and new ones avoid for a time {}",
                described(&new)
            );
            if post(Reason::EndpointEjected, note) {
                problems.ejected.extend(new);
            }
        }
        let back: BTreeSet<_> = problems.ejected.difference(&current.ejected).cloned().collect();
        if !back.is_empty() {
            let note = format!("new connections from node {node} no longer avoid {}", described(&back));
            if post(Reason::EndpointReturned, note) {
                problems.ejected.retain(|it| !back.contains(it));
            }
        }
        has_waited
    }

    fn refill(&mut self, now: Instant) {
        while self.tokens < MAX_BURST && now - self.refilled_at >= REFILL_INTERVAL {
            self.tokens += 1;
            self.refilled_at += REFILL_INTERVAL;
        }
        if self.tokens == MAX_BURST {
            self.refilled_at = now;
        }
    }
}

fn event(service: ServiceName, reason: Reason, note: String) -> ServiceEvent {
    let (is_warning, reason, action, is_of_cluster) = match reason {
        Reason::InvalidAnnotation => (true, "InvalidAnnotation", "Ignore", true),
        Reason::NamespaceOverLimit => (true, "NamespaceOverLimit", "Serve", true),
        Reason::EndpointEjected => (true, "EndpointEjected", "Eject", false),
        Reason::EndpointReturned => (false, "EndpointReturned", "Return", false),
    };
    ServiceEvent { service, is_warning, reason, action, note, is_of_cluster }
}

/// The number of endpoints, and some of them.
fn described(endpoints: &BTreeSet<String>) -> String {
    let named: Vec<_> = endpoints.iter().take(MAX_NAMED).map(String::as_str).collect();
    let more = if endpoints.len() > MAX_NAMED { ", …" } else { "" };
    format!("{}: {}{more}", model::counted(endpoints.len(), "endpoint"), named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: Duration = Duration::from_secs(5);

    /// Services by number, with their ejected endpoints.
    struct Node {
        events: ServiceEvents,
        problems: BTreeMap<ServiceName, Problems>,
        now: Instant,
    }

    impl Node {
        fn new() -> Self {
            let now = Instant::now();
            let events = ServiceEvents::new("n1".into(), now);
            Self { events, problems: BTreeMap::new(), now }
        }

        fn eject(&mut self, service: usize, endpoints: std::ops::Range<usize>) {
            let ejected = endpoints.map(|it| format!("10.0.0.{it}:80")).collect();
            let service = ServiceName::new("default", format!("s{service}"));
            self.problems.insert(service, Problems { ejected, ..Problems::default() });
        }

        /// Lets time pass; the Events as `name reason: note`.
        fn after(&mut self, time: Duration) -> Vec<String> {
            self.now += time;
            let events = self.events.update(self.problems.clone(), |_| true, self.now);
            events.iter().map(|it| format!("{} {}: {}", it.service.name, it.reason, it.note)).collect()
        }
    }

    #[test]
    fn endpoints_that_are_ejected_together_are_one_event() {
        let mut node = Node::new();
        node.eject(1, 1..3);
        let text = "s1 EndpointEjected: connections from node n1 fail, and new ones avoid for a time 2 endpoints: \
                    10.0.0.1:80, 10.0.0.2:80";
        assert_eq!(node.after(POLL), [text]);
        assert_eq!(node.after(POLL).len(), 0, "it was posted");
        node.eject(1, 2..3);
        let text =
            "s1 EndpointReturned: new connections from node n1 no longer avoid 1 endpoint: 10.0.0.1:80";
        assert_eq!(node.after(POLL), [text]);
        // Of the same reason there is one in a while, about all that happened meanwhile.
        node.eject(1, 2..4);
        assert_eq!(node.after(POLL).len(), 0);
        node.eject(1, 2..102);
        let events = node.after(SERVICE_INTERVAL);
        assert!(events.len() == 1 && events[0].contains(" 99 endpoints: "), "{events:?}");
        assert!(events[0].ends_with(", …") && events[0].len() < 1_000, "{events:?}");
        node.problems.clear();
        assert_eq!(node.after(SERVICE_INTERVAL).len(), 1);
        assert_eq!(node.after(SERVICE_INTERVAL).len(), 0);
        assert!(node.events.posted.is_empty(), "nothing is kept of a Service without problems");
    }

    #[test]
    fn what_is_over_before_its_turn_is_not_posted() {
        let mut node = Node::new();
        node.eject(1, 1..2);
        assert_eq!(node.after(POLL).len(), 1);
        node.problems.clear();
        assert_eq!(node.after(POLL).len(), 1);
        for _ in 0..5 {
            node.eject(1, 1..2);
            assert_eq!(node.after(POLL).len(), 0);
            node.problems.clear();
            assert_eq!(node.after(POLL).len(), 0);
        }
    }

    #[test]
    fn many_services_have_events_at_a_bounded_rate_and_in_turn() {
        let mut node = Node::new();
        (0..100).for_each(|it| node.eject(it, 1..2));
        let mut events = node.after(POLL);
        assert_eq!(events.len(), MAX_BURST as usize);
        assert_eq!(node.after(Duration::ZERO).len(), 0);
        for _ in 0..90 {
            events.extend(node.after(REFILL_INTERVAL));
            // One that is ejected and returns again and again does not keep others waiting.
            let flaps = node.problems.remove(&ServiceName::new("default", "s0")).is_none();
            if flaps {
                node.eject(0, 1..2);
            }
        }
        let posted: BTreeSet<_> = events.iter().filter_map(|it| it.split(' ').next()).collect();
        assert_eq!(events.len(), 100);
        assert_eq!(posted.len(), 100, "{posted:?}");
    }

    #[test]
    fn an_ignored_annotation_is_posted_once_and_the_same_by_every_node() {
        let mut node = Node::new();
        let service = ServiceName::new("default", "s1");
        let set = |node: &mut Node, all: &[&str]| {
            let annotations = all.iter().map(|&it| it.to_owned()).collect();
            node.problems.insert(service.clone(), Problems { annotations, ..Problems::default() });
        };
        set(&mut node, &["a: no", "b: no"]);
        assert_eq!(node.after(POLL), ["s1 InvalidAnnotation: a: no; b: no"]);
        set(&mut node, &["b: no"]);
        assert_eq!(node.after(SERVICE_INTERVAL).len(), 0);
        set(&mut node, &["a: no", "b: no"]);
        let events = node.events.update(node.problems.clone(), |_| true, node.now + SERVICE_INTERVAL);
        assert!(events.len() == 1 && events[0].is_of_cluster && !events[0].note.contains("n1"), "{events:?}");
    }

    #[test]
    fn a_service_that_does_not_fit_has_one_event() {
        let mut node = Node::new();
        let problems = Problems { over_limit: Some("too many".into()), ..Problems::default() };
        node.problems.insert(ServiceName::new("default", "s1"), problems);
        assert_eq!(node.after(POLL), ["s1 NamespaceOverLimit: too many"]);
        assert_eq!(node.after(SERVICE_INTERVAL).len(), 0);
        node.problems.clear();
        node.after(SERVICE_INTERVAL);
        assert!(node.events.posted.is_empty());
    }

    #[test]
    fn endpoints_of_a_deleted_service_do_not_return() {
        let mut node = Node::new();
        node.eject(1, 1..2);
        assert_eq!(node.after(POLL).len(), 1);
        assert_eq!(node.events.update(BTreeMap::new(), |_| false, node.now + POLL), []);
    }
}
