//! The body of the page `/trace`: lines as they come.
//!
//! Invariant: it keeps its connection open for as long as the client reads, and ends with its sender.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use hyper::body::{Body, Bytes, Frame};
use tokio::{
    sync::mpsc,
    time::{Duration, Instant},
};

use crate::state::lock;

/// How long a client may read nothing.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a trace may take to begin: the kernel verifies the programs first.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// When a connection is closed unless the client goes on.
#[derive(Clone, Debug)]
pub(crate) struct Expiry(pub(crate) Arc<Mutex<Instant>>);

impl Expiry {
    /// A trace begins.
    pub(crate) fn wait_for_start(&self) {
        *lock(&self.0) = Instant::now() + START_TIMEOUT;
    }
}

/// The body of a trace. It ends with its sender; the sender learns that the client is gone when this is dropped.
#[derive(Debug)]
pub(crate) struct TraceBody {
    lines: mpsc::Receiver<String>,
    expiry: Option<Expiry>,
}

impl TraceBody {
    pub(crate) fn new(lines: mpsc::Receiver<String>, expiry: Option<Expiry>) -> Self {
        Self { lines, expiry }
    }
}

impl Body for TraceBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let lines = self.lines.poll_recv(context);
        if lines.is_ready()
            && let Some(expiry) = &self.expiry
        {
            *lock(&expiry.0) = Instant::now() + READ_TIMEOUT;
        }
        lines.map(|it| it.map(|lines| Ok(Frame::data(lines.into()))))
    }
}
