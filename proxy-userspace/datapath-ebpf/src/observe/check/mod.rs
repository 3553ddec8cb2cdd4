//! Whether this node can run the datapath, and whether it works: findings with remedies.
//!
//! Invariant: read-only. Nothing is mounted, attached or repaired, and no lock is held beyond a query.

mod forwarding;
mod host;
mod installation;

use datapath::{Checkup, Finding};

use crate::{
    host::capabilities::{Capabilities, kernel_release},
    maps::pins::Pins,
    options::Options,
};

pub fn kernel() -> Finding {
    host::kernel(&kernel_release())
}

/// Whether an instance runs or has run here.
pub fn has_run(options: &Options) -> bool {
    !Pins::new(&options.pin_dir).is_empty()
}

/// Whether this process can terminate connected UDP sockets of pods.
pub fn reaches_sockets_of_pods() -> bool {
    host::enters_pods(Capabilities::own())
}

/// Checks this node; `is_forwarding` says whether packets from outside are to be forwarded by default.
pub fn check(options: &Options, is_forwarding: bool) -> Checkup {
    let mut checkup = Checkup {
        host: host::check(options),
        installation: installation::check(options),
        conflicts: vec![installation::foreign_programs(options)],
        is_left_to_kube_proxy: false,
    };
    forwarding::check(options, is_forwarding, &mut checkup);
    checkup
}
