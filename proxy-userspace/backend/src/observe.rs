//! What a backend does, for whoever reports it.
//!
//! The one rule: an observer is told, never asked. Nothing that it does or fails to do changes what is served.

use std::{io, sync::Arc, time::Duration};

use model::Rejected;
use publish::Published;

use crate::{
    Heard,
    ebpf::{Ended, Hooks, Memory, Report},
};

/// Hears of what a backend does, as it happens, in the order in which it happens.
///
/// Every method returns at once.
pub trait Observer {
    /// A state was taken up, to be brought into force; again if it failed before.
    fn taken(&self, published: &Arc<Published>);

    /// A state is in force, so long after it was taken up.
    fn in_force(&self, published: &Arc<Published>, report: &Report, took: Duration);

    /// Something failed and will be tried again; what was in force stays so.
    fn failed(&self, doing: Doing, error: &str);

    /// The kernel was asked which programs are in effect.
    fn looked(&self, hooks: Result<&Hooks, &str>);

    /// Why traffic that has no socket here is not served though it should be; `None` where all is well.
    fn lacking(&self, packets: Option<&Rejected>);

    /// The hooks were tried from inside.
    fn tried(&self, heard: &[Heard]);

    /// UDP sockets were looked for whose endpoint does not serve any more; those that there were are ended.
    fn ended(&self, ended: &io::Result<Ended>);

    /// The kernel was asked how much is remembered for sockets and clients.
    fn memory(&self, memory: Memory);
}

/// What a backend was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Doing {
    /// Writing a state into the maps.
    Apply,
    /// Putting the programs in effect.
    Attach,
    /// Readying the spare maps for the next change.
    Settle,
}

impl Doing {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Apply, Self::Attach, Self::Settle];

    /// Its name, as in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Apply => "apply",
            Self::Attach => "attach",
            Self::Settle => "settle",
        }
    }
}
