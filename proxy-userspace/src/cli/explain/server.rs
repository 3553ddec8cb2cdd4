//! The page `/explain` of `run` and `brain`.

use std::sync::Arc;

use admin::Admin;
use brain::Query;
use pipeline::{Explainer, Pipeline};

/// Lets the status pages answer questions by the cluster state of a pipeline.
pub(in crate::cli) fn serve(admin: &Admin, pipeline: &Pipeline) {
    let (explainer, node) = (pipeline.explainer(), Arc::<str>::from(pipeline.node()));
    admin.set_explainer(move |words| {
        let (explainer, node) = (explainer.clone(), Arc::clone(&node));
        Box::pin(async move { answer(&explainer, &node, &words).await.map_err(|it| format!("{it:#}")) })
    });
}

async fn answer(explainer: &Explainer, node: &str, words: &[String]) -> anyhow::Result<String> {
    let explanation = explainer.explain(node, &Query::parse(words)?).await?;
    Ok(serde_json::to_string(&explanation)?)
}
