//! A node's datapath as it shows outside: one state is active, and a state that cannot be applied leaves the one before.

use std::time::Duration;

use model::state::NodeState;
use publish::Subscription;
use tokio::{sync::watch, time::sleep};

use crate::{
    history,
    truth::Observed,
    world::{Name, World},
};

/// What lasts when the process that drives it dies.
#[derive(Clone)]
pub(crate) struct Kernel {
    name: Name,
    /// Whether it forgets some of what it is to apply.
    is_lossy: bool,
    /// Instance and revision of the active state.
    pub(crate) active: watch::Sender<Option<(u64, u64)>>,
}

impl Kernel {
    pub(crate) fn new(name: Name, is_lossy: bool) -> Self {
        Self { name, is_lossy, active: watch::Sender::new(None) }
    }
}

/// Keeps a kernel at the newest state; retries what fails, as the reconciler does. Ends with the subscription.
pub(crate) async fn drive(kernel: &Kernel, mut states: Subscription, world: &World) {
    let mut pending = None;
    let mut delay = Duration::from_millis(100);
    loop {
        tokio::select! {
            biased;
            next = states.next() => {
                let Some(next) = next else { return };
                pending = Some(next);
                delay = Duration::from_millis(100);
            }
            () = sleep(delay), if pending.is_some() => delay = (delay * 2).min(Duration::from_secs(30)),
        }
        let Some(published) = &pending else { continue };
        if world.fails() {
            history::note(format_args!("{} cannot apply a state", kernel.name));
            continue;
        }
        let mut state = published.state.clone();
        if kernel.is_lossy && fastrand::u8(..8) == 0 {
            lose_one(&mut state);
        }
        world.observe(kernel.name, Observed::Full(state));
        kernel.active.send_replace(Some(published.revision()));
        pending = None;
    }
}

fn lose_one(state: &mut NodeState) {
    let first = state.services.values().next().map(|it| it.service.name.clone());
    first.map(|it| state.services.remove(&it));
}
