//! What `explain` says: the brain's explanation, what the kernel has, and where they differ.

use std::{collections::BTreeSet, net::SocketAddr, num::NonZeroU16};

use brain::Explanation;
use serde::Serialize;

use super::{forwarding::Forwarding, kernel::Kernel};

/// What is known of a connection.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Answer {
    /// What the brain says of it.
    #[serde(flatten)]
    pub(super) explanation: Option<Explanation>,
    /// The port of the client, if the question names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) client_port: Option<NonZeroU16>,
    /// Why the brain says nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) unexplained: Option<String>,
    /// What the kernel has for it; none if that was not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kernel: Option<Kernel>,
    /// For how long the process's state has been active.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) active_seconds: Option<u64>,
    /// Where the kernel differs from the explanation.
    pub(super) differences: Vec<String>,
    /// What the process reports of itself that may be the cause.
    pub(super) problems: Vec<String>,
}

impl Answer {
    /// Adds an explanation, as far as the kernel does not know better, and where the kernel differs from it; packets to the
    /// Service avoid some endpoints.
    pub(super) fn add(&mut self, explanation: Explanation, kernel: Kernel, avoided: &BTreeSet<SocketAddr>) {
        let explanation = kernel.correct(explanation);
        let forwarding = kernel.forwarding.as_ref();
        self.differences = kernel.differences(&explanation, avoided);
        self.differences.extend(forwarding.and_then(Forwarding::difference));
        self.explanation = Some(match forwarding {
            Some(it) => it.narrow(explanation),
            None => explanation,
        });
        self.kernel = Some(kernel);
    }

    /// Whether everything is known, and the kernel has what the brain says.
    pub(super) fn is_complete(&self) -> bool {
        let has_errors = self.kernel.as_ref().is_some_and(|it| !it.errors.is_empty());
        self.explanation.is_some() && self.differences.is_empty() && !has_errors
    }
}
