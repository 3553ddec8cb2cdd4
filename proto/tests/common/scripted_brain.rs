//! A brain that sends prepared change sets, as KPNG's does: it resets once per stream, never syncs an empty difference,
//! sends no extensions unless it is told to, and ignores what it does not know.

use std::{
    path::Path,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use prost::Message;
use proxy_contract::localv1::{
    EmptyOp, OpItem, Ref, Set, Value, WatchReq,
    op_item::Op,
    sets_server::{Sets, SetsServer},
};
use tokio::{
    net::UnixListener,
    sync::{mpsc, watch},
};
use tokio_stream::{
    Stream,
    wrappers::{ReceiverStream, UnixListenerStream},
};
use tonic::{
    Request, Response, Status, Streaming,
    transport::server::{Router, Server},
};

pub(crate) type Items = Pin<Box<dyn Stream<Item = Result<OpItem, Status>> + Send>>;

#[derive(Clone)]
pub(crate) struct ScriptedBrain {
    pub(crate) change_sets: Arc<Vec<Vec<OpItem>>>,
    /// How many change sets there are now; each request gets one.
    pub(crate) available: Arc<watch::Sender<usize>>,
    /// The extensions of the reset.
    pub(crate) extensions: Vec<i32>,
    pub(crate) streams: Arc<AtomicUsize>,
}

impl ScriptedBrain {
    pub(crate) fn new(change_sets: impl Into<Vec<Vec<OpItem>>>) -> Self {
        let change_sets = Arc::new(change_sets.into());
        let available = Arc::new(watch::Sender::new(change_sets.len()));
        Self { change_sets, available, extensions: Vec::new(), streams: Arc::default() }
    }

    /// Serves the state of the node `n1` at a socket, until the runtime ends.
    pub(crate) fn serve(self, socket: &Path) {
        serve_at(socket, Server::builder().add_service(SetsServer::new(self)));
    }

    /// Answers the requests of one stream, as long as they are the expected ones.
    pub(crate) fn start<R: Send + 'static>(
        &self,
        mut requests: Streaming<R>,
        is_expected: fn(&R) -> bool,
    ) -> Response<Items> {
        let (sender, items) = mpsc::channel(16);
        self.streams.fetch_add(1, Ordering::SeqCst);
        let (change_sets, mut available) = (Arc::clone(&self.change_sets), self.available.subscribe());
        let extensions = self.extensions.clone();
        tokio::spawn(async move {
            let send = async |op| drop(sender.send(Ok(OpItem { op: Some(op) })).await);
            for (index, change_set) in change_sets.iter().enumerate() {
                let request = requests.message().await.ok().flatten();
                if !request.is_some_and(|it| is_expected(&it)) {
                    return;
                }
                if index == 0 {
                    send(Op::Reset(EmptyOp { extensions: extensions.clone(), ..EmptyOp::default() })).await;
                }
                let Ok(_) = available.wait_for(|it| *it > index).await else { return };
                for item in change_set {
                    let _ = sender.send(Ok(item.clone())).await;
                }
                send(Op::Sync(EmptyOp::default())).await;
            }
            sender.closed().await;
        });
        Response::new(Box::pin(ReceiverStream::new(items)))
    }
}

pub(crate) fn serve_at(socket: &Path, router: Router) {
    let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    tokio::spawn(router.serve_with_incoming(incoming));
}

#[tonic::async_trait]
impl Sets for ScriptedBrain {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<WatchReq>>) -> Result<Response<Items>, Status> {
        Ok(self.start(request.into_inner(), |it| it.node_name == "n1"))
    }
}

pub(crate) fn set(set: Set, path: &str, message: &impl Message) -> OpItem {
    let reference = Ref { set: set.into(), path: path.into() };
    OpItem { op: Some(Op::Set(Value { r#ref: Some(reference), bytes: message.encode_to_vec().into() })) }
}

pub(crate) fn delete(set: Set, path: &str) -> OpItem {
    OpItem { op: Some(Op::Delete(Ref { set: set.into(), path: path.into() })) }
}
