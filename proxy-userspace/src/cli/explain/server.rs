//! Explanations by a process: the page `/explain` of `run` and `brain`, and what the page for people shows.

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, sync::Arc};

use admin::Admin;
use anyhow::{Context as _, Error, Result};
use brain::{Explanation, Query};
use model::Protocol;
use pipeline::{Explainer, Pipeline};
use tokio::task::spawn_blocking;

use super::{
    answer::Answer,
    kernel::{Asked, Kernel},
};

/// Lets the status pages answer questions by the cluster state of a pipeline.
pub(in crate::cli) fn serve(admin: &Admin, pipeline: &Pipeline) {
    let (explainer, node) = (pipeline.explainer(), Arc::<str>::from(pipeline.node()));
    admin.set_explainer(move |words| {
        let (explainer, node) = (explainer.clone(), Arc::clone(&node));
        Box::pin(async move { answer(&explainer, &node, &words).await.map_err(|it| format!("{it:#}")) })
    });
}

async fn answer(explainer: &Explainer, node: &str, words: &[String]) -> Result<String> {
    let explanation = explainer.explain(node, &Query::parse(words)?).await?;
    Ok(serde_json::to_string(&explanation)?)
}

/// Lets the page for people show reasons by the cluster state of a pipeline, if there is one, with what the kernel has for
/// connections of any client; what the eBPF maps have, if the socket path is on.
pub(in crate::cli) fn serve_with_kernel(
    admin: &Admin,
    pipeline: Option<&Pipeline>,
    pin_dir: Option<PathBuf>,
) {
    let explainer = pipeline.map(|it| (it.explainer(), Arc::<str>::from(it.node())));
    let asked = admin.clone();
    admin.set_kernel_explainer(move |words| {
        let (explainer, admin, pin_dir) = (explainer.clone(), asked.clone(), pin_dir.clone());
        Box::pin(async move {
            let answer = answer_with_kernel(explainer, admin, pin_dir, &words).await;
            answer.map_err(|it| format!("{it:#}"))
        })
    });
}

async fn answer_with_kernel(
    explainer: Option<(Explainer, Arc<str>)>,
    admin: Admin,
    pin_dir: Option<PathBuf>,
    words: &[String],
) -> Result<String> {
    let query = Query::parse(words)?;
    let explanation = match &explainer {
        Some((explainer, node)) => Some(explainer.explain(node, &query).await?),
        None => None,
    };
    let destination = match &explanation {
        Some(it) => (it.destination, it.protocol.parse::<Protocol>().map_err(Error::msg)?),
        None => query.address().context("only the brain knows names of Services: give ADDRESS:PORT")?,
    };
    let read = move || Kernel::read(pin_dir.as_deref(), destination, Asked::All);
    let kernel = spawn_blocking(read).await?;
    let mut answer = Answer { explanation, ..Answer::default() };
    match &answer.explanation {
        Some(it) => answer.differences = kernel.differences(it, &avoided(&admin, it)),
        None => answer.unexplained = Some("the brain that is followed knows the reasons".into()),
    }
    answer.kernel = Some(kernel);
    Ok(serde_json::to_string(&answer)?)
}

/// The endpoints that packets to a Service avoid.
fn avoided(admin: &Admin, explanation: &Explanation) -> BTreeSet<SocketAddr> {
    let ejected = admin.ejected_endpoints().into_iter();
    let of_node = ejected.filter(|it| it.has_node && Some(it.service.to_string()) == explanation.service);
    of_node.map(|it| it.endpoint).collect()
}
