//! A trace: programs that report each decision are attached while their reports are read.
//!
//! Invariant: the product's programs return when the reader is gone, however it ends.

use std::future::pending;

use datapath_ebpf::TracedPrograms;
use tokio::sync::{mpsc, oneshot};

/// A request to attach the programs of a trace.
pub struct TraceRequest {
    pub programs: TracedPrograms,
    /// Is told whether they are attached, or why not.
    pub begun: oneshot::Sender<Result<(), String>>,
    /// They are attached until its sender is dropped.
    pub ended: oneshot::Receiver<()>,
}

/// What happens to traces.
pub(crate) enum TraceEvent {
    Requested(Box<TraceRequest>),
    Ended,
}

/// The requests, and the trace that runs.
#[derive(Default)]
pub(crate) struct Traces {
    pub(crate) requests: Option<mpsc::Receiver<TraceRequest>>,
    /// Of the trace that runs.
    pub(crate) ended: Option<oneshot::Receiver<()>>,
}

impl Traces {
    /// The next event. Cancel safe.
    pub(crate) async fn next(&mut self) -> TraceEvent {
        let ended = async {
            match &mut self.ended {
                // Nothing is ever sent.
                Some(ended) => drop(ended.await),
                None => pending().await,
            }
        };
        let requested = async {
            match &mut self.requests {
                Some(requests) => requests.recv().await,
                None => None,
            }
        };
        tokio::select! {
            biased;
            () = ended => {
                self.ended = None;
                TraceEvent::Ended
            }
            Some(request) = requested => TraceEvent::Requested(Box::new(request)),
            else => pending().await,
        }
    }
}
