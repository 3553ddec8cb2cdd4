//! Explanations by a process: the page `/explain` of `run`, `agent` and `brain`, and what the page for people shows.

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, sync::Arc};

use admin::{Admin, NoAnswer};
use brain::{Explanation, InvalidQuery, Query};
use model::Protocol;
use pipeline::{BrainExplainer, ExplainError, Explainer, NoReasons, Pipeline};
use serde::Serialize;
use tokio::task::spawn_blocking;

use super::{
    answer::Answer,
    kernel::{Asked, Kernel},
};

/// Who knows the reasons.
#[derive(Clone, Debug)]
pub(in crate::cli) enum Reasons {
    /// The cluster state of this process, for this node.
    Own(Explainer, Arc<str>),
    /// The brain that is followed, which is asked for each question.
    Brain(BrainExplainer),
}

impl Reasons {
    /// Those of the cluster state of a pipeline.
    pub(in crate::cli) fn of(pipeline: &Pipeline) -> Self {
        Self::Own(pipeline.explainer(), pipeline.node().into())
    }

    async fn explain(&self, words: &[String], query: &Query) -> Result<Explanation, NoAnswer> {
        match self {
            Self::Own(explainer, node) => explainer.explain(node, query).await.map_err(|error| match error {
                ExplainError::Invalid(error) => invalid(&error),
                error => NoAnswer::Unavailable(error.to_string()),
            }),
            Self::Brain(brain) => brain.explain(words).await.map_err(|error| match error {
                NoReasons::Invalid(error) => NoAnswer::Invalid(error),
                error @ NoReasons::Unavailable { .. } => NoAnswer::Unavailable(error.to_string()),
            }),
        }
    }
}

fn invalid(error: &InvalidQuery) -> NoAnswer {
    NoAnswer::Invalid(error.to_string())
}

fn json(it: &impl Serialize) -> Result<String, NoAnswer> {
    serde_json::to_string(it).map_err(|error| NoAnswer::Unavailable(error.to_string()))
}

/// Lets the status pages answer questions.
pub(in crate::cli) fn serve(admin: &Admin, reasons: Reasons) {
    admin.set_explainer(move |words| {
        let reasons = reasons.clone();
        Box::pin(async move {
            let query = Query::parse(&words).map_err(|it| invalid(&it))?;
            json(&reasons.explain(&words, &query).await?)
        })
    });
}

/// Lets the page for people show reasons, with what the kernel has for connections of any client; what the eBPF maps have, if
/// the socket path is on.
pub(in crate::cli) fn serve_with_kernel(admin: &Admin, reasons: Reasons, pin_dir: Option<PathBuf>) {
    let asked = admin.clone();
    admin.set_kernel_explainer(move |words| {
        let (reasons, admin, pin_dir) = (reasons.clone(), asked.clone(), pin_dir.clone());
        Box::pin(async move { json(&answer_with_kernel(&reasons, &admin, pin_dir, &words).await?) })
    });
}

/// What is known of a connection; only what the kernel has, if the reasons are not available and the destination is an
/// address.
async fn answer_with_kernel(
    reasons: &Reasons,
    admin: &Admin,
    pin_dir: Option<PathBuf>,
    words: &[String],
) -> Result<Answer, NoAnswer> {
    let query = Query::parse(words).map_err(|it| invalid(&it))?;
    let (explanation, unexplained) = match reasons.explain(words, &query).await {
        Ok(explanation) => (Some(explanation), None),
        Err(NoAnswer::Unavailable(error)) if query.address().is_some() => (None, Some(error)),
        Err(error) => return Err(error),
    };
    let explained = explanation.as_ref().and_then(|it| Some((it.destination, it.protocol.parse().ok()?)));
    let Some(destination): Option<(SocketAddr, Protocol)> = explained.or_else(|| query.address()) else {
        return Err(NoAnswer::Unavailable("the explanation has an unknown protocol".into()));
    };
    let read = move || Kernel::read(pin_dir.as_deref(), destination, Asked::All);
    let kernel = spawn_blocking(read).await.map_err(|it| NoAnswer::Unavailable(it.to_string()))?;
    let explanation = explanation.map(|it| kernel.correct(it));
    let differences = explanation.as_ref().map(|it| kernel.differences(it, &avoided(admin, it)));
    Ok(Answer {
        explanation,
        unexplained,
        kernel: Some(kernel),
        differences: differences.unwrap_or_default(),
        ..Answer::default()
    })
}

/// The endpoints that packets to a Service avoid.
fn avoided(admin: &Admin, explanation: &Explanation) -> BTreeSet<SocketAddr> {
    let ejected = admin.ejected_endpoints().into_iter();
    let of_node = ejected.filter(|it| it.has_node && Some(it.service.to_string()) == explanation.service);
    of_node.map(|it| it.endpoint).collect()
}
