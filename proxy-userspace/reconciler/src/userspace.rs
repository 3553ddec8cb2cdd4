//! Keeps the datapath of ordinary sockets at the newest published state.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use datapath::{ApplyReport, AttachStatus};
use datapath_userspace::{Datapath, Options};
use model::Rejected;
use publish::{Published, Subscription};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::{observer::Observer, state_log::StateLog};

/// How often addresses that could not be listened at are tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Serves the newest of `states` until the publisher is gone, and nothing after that.
pub async fn run_userspace(options: Options, mut states: Subscription, observer: &dyn Observer) {
    let mut datapath = Datapath::new(options);
    let mut active: Option<Arc<Published>> = None;
    let mut logged = BTreeSet::new();
    let mut state_log = StateLog::default();
    let mut retry = interval(RETRY_INTERVAL);
    retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let begin = Instant::now();
        let report = tokio::select! {
            next = states.next() => {
                let Some(published) = next else { return };
                observer.on_dequeued(&published);
                let report = datapath.apply(&published.state);
                if report.flipped {
                    state_log.active(published.rev, &report, begin.elapsed());
                }
                active = Some(published);
                report
            }
            _ = retry.tick() => {
                state_log.summarize();
                // There are no programs that could be detached.
                observer.on_attach_checked(Ok(&AttachStatus { cgroup: "no cgroup".into(), ..AttachStatus::default() }));
                if !datapath.has_failed() {
                    continue;
                }
                datapath.retry();
                let services = active.as_ref().map_or(0, |it| it.state.services.len());
                ApplyReport { services, rejected: datapath.rejected(), ..ApplyReport::default() }
            }
        };
        let rejected: BTreeSet<Rejected> = report.rejected.iter().cloned().collect();
        for it in rejected.difference(&logged) {
            tracing::warn!("{}", it.log_line());
        }
        logged = rejected;
        if let Some(active) = &active {
            observer.on_applied(active, &report, begin.elapsed());
        }
    }
}
