//! Whether this node can run the data plane, and whether it runs right: findings for people, each with its remedy.
//!
//! The one rule: it only looks. Nothing is mounted, attached, locked for longer than a look, or mended.

mod machine;
mod netfilter;
mod own;
mod rivals;

pub(super) use machine::{is_powerless, locks_little, may_load};

use super::Options;
use crate::agent::chain;

/// How good something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// As it should be.
    Ok,
    /// It works, but something is missing or in the way.
    Degraded,
    /// It cannot work like this.
    Broken,
}

impl Level {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Broken => "broken",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at, in a word or two.
    pub subject: &'static str,
    /// How good it is.
    pub level: Level,
    /// What was found, and what it means.
    pub says: String,
    /// What to do about it.
    pub remedy: Option<String>,
}

impl Finding {
    /// All is well.
    pub fn ok(subject: &'static str, says: impl Into<String>) -> Self {
        Self { subject, level: Level::Ok, says: says.into(), remedy: None }
    }

    /// It works, but.
    pub fn degraded(subject: &'static str, says: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { subject, level: Level::Degraded, says: says.into(), remedy: Some(remedy.into()) }
    }

    /// It cannot work.
    pub fn broken(subject: &'static str, says: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { subject, level: Level::Broken, says: says.into(), remedy: Some(remedy.into()) }
    }

    /// It could not be had; the error says what to do, where we know.
    pub(crate) fn failed(subject: &'static str, error: &dyn std::error::Error) -> Self {
        Self { subject, level: Level::Broken, says: chain(error), remedy: None }
    }
}

/// What a look at a node found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkup {
    /// Whether it can run here.
    pub machine: Vec<Finding>,
    /// Whether it runs right.
    pub own: Vec<Finding>,
    /// Who else does the same here.
    pub rivals: Vec<Finding>,
}

/// What this kernel can do.
pub fn kernel() -> Finding {
    machine::kernel(&machine::release())
}

/// Whether kube-proxy's rules are here.
pub(crate) fn rules() -> Finding {
    rivals::rules()
}

/// Looks at this node.
pub fn check(options: &Options) -> Checkup {
    Checkup { machine: machine::check(options), own: own::check(options), rivals: rivals::check(options) }
}
