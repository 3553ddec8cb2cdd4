//! Findings of `check`: what was examined on a node, how good it is, and what to do about it.

use std::error::Error;

use model::error_chain;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// As it should be.
    Ok,
    /// It works, with something missing or in the way.
    Degraded,
    /// It does not work.
    Broken,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Broken => "broken",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was checked, in a word or two.
    pub subject: &'static str,
    pub level: Level,
    /// What was found, and what it means.
    pub says: String,
    pub remedy: Option<String>,
}

impl Finding {
    pub fn ok(subject: &'static str, says: impl Into<String>) -> Self {
        Self { subject, level: Level::Ok, says: says.into(), remedy: None }
    }

    pub fn degraded(subject: &'static str, says: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { subject, level: Level::Degraded, says: says.into(), remedy: Some(remedy.into()) }
    }

    pub fn broken(subject: &'static str, says: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { subject, level: Level::Broken, says: says.into(), remedy: Some(remedy.into()) }
    }

    /// The check itself met an error; its text names the remedy where one is known.
    pub fn failed(subject: &'static str, level: Level, error: &(dyn Error + 'static)) -> Self {
        Self { subject, level, says: error_chain(error), remedy: None }
    }
}

/// All findings of one `check`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkup {
    /// Whether the host has what the datapaths need.
    pub host: Vec<Finding>,
    /// Whether what is installed works.
    pub installation: Vec<Finding>,
    /// Who else translates Services on this node.
    pub conflicts: Vec<Finding>,
    /// Whether kube-proxy serves this node, and nothing of this program is there.
    pub is_left_to_kube_proxy: bool,
}
