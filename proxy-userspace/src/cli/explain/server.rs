//! Explanations by a process: the page `/explain` of `run`, `agent` and `brain`, and what the page for people shows.

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, sync::Arc};

use admin::Admin;
use brain::{Explanation, Query};
use model::Protocol;
use pipeline::{Explainer, NoReasons};
use serde::Serialize;
use tokio::task::spawn_blocking;

use super::{
    answer::Answer,
    kernel::{Asked, Kernel},
};

/// Lets the status pages answer questions.
pub(in crate::cli) fn serve(admin: &Admin, explainer: Explainer) {
    admin.set_readers(|it| {
        it.explainer = Some(Arc::new(move |words| {
            let explainer = explainer.clone();
            Box::pin(async move { json(&explainer.explain(&words).await?) })
        }));
    });
}

/// Lets the page for people show reasons, too, with what the kernel has for connections of any client; what the eBPF maps have,
/// if the socket path is on.
pub(in crate::cli) fn serve_with_kernel(admin: &Admin, explainer: Explainer, pin_dir: Option<PathBuf>) {
    serve(admin, explainer.clone());
    let asked = admin.clone();
    admin.set_readers(|it| {
        it.kernel_explainer = Some(Arc::new(move |words| {
            let (explainer, admin, pin_dir) = (explainer.clone(), asked.clone(), pin_dir.clone());
            Box::pin(async move { json(&answer_with_kernel(&explainer, &admin, pin_dir, &words).await?) })
        }));
    });
}

/// What is known of a connection; only what the kernel has, if the reasons are not available and the destination is an
/// address.
async fn answer_with_kernel(
    explainer: &Explainer,
    admin: &Admin,
    pin_dir: Option<PathBuf>,
    words: &[String],
) -> Result<Answer, NoReasons> {
    let query = Query::parse(words)?;
    let explained = explainer.explain(words).await;
    let destination = match (&explained, query.address()) {
        (Ok(it), _) => (it.destination, it.protocol.parse::<Protocol>().map_err(NoReasons::Unavailable)?),
        (Err(NoReasons::NoClusterState | NoReasons::Unavailable(_)), Some(address)) => address,
        (Err(error), _) => return Err(error.clone()),
    };
    let read = move || Kernel::read(pin_dir.as_deref(), destination, Asked::All);
    let kernel = spawn_blocking(read).await.map_err(|it| NoReasons::Unavailable(it.to_string()))?;
    let mut answer = Answer::default();
    match explained {
        Ok(it) => {
            let avoided = avoided(admin, &it);
            answer.add(it, kernel, &avoided);
            Ok(answer)
        }
        Err(error) => Ok(Answer { unexplained: Some(error.to_string()), kernel: Some(kernel), ..answer }),
    }
}

/// The endpoints that packets to a Service avoid.
fn avoided(admin: &Admin, explanation: &Explanation) -> BTreeSet<SocketAddr> {
    let ejected = admin.ejected_endpoints().into_iter();
    let of_node = ejected.filter(|it| it.has_node && Some(it.service.to_string()) == explanation.service);
    of_node.map(|it| it.endpoint).collect()
}

fn json(it: &impl Serialize) -> Result<String, NoReasons> {
    serde_json::to_string(it).map_err(|error| NoReasons::Unavailable(error.to_string()))
}
