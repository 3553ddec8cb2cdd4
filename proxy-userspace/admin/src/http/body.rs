//! Bodies that are made while they are read: large pages, and the lines of a trace.
//!
//! Invariant: a reader of a page costs a piece and references to the state, whatever the size of the page and however slowly it
//! reads. A trace keeps its connection open for as long as the client reads, and ends with its sender.

use std::{
    convert::Infallible,
    fmt, iter,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use hyper::body::{Body, Bytes, Frame};
use model::escaped;
use tokio::{sync::mpsc, time::Instant};

use crate::state::lock;

/// From this size on, a piece is handed to the connection, in bytes.
const PIECE: usize = 16 << 10;
/// How many parts are rendered before other connections have their turn: parts may be empty.
const MAX_PARTS: usize = 256;

/// The parts of a page in order, each rendered when it is asked for.
pub(crate) type Parts = Box<dyn Iterator<Item = Result<String, String>> + Send>;

/// The body of a response that is rendered while it is read.
pub(crate) struct StreamedBody(iter::Fuse<Parts>);

/// A part could not be rendered: the response ends without its end.
#[derive(Debug)]
pub(crate) struct RenderError(String);

impl fmt::Display for RenderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RenderError {}

impl StreamedBody {
    pub(crate) fn new(parts: Parts) -> Self {
        Self(parts.fuse())
    }
}

impl Body for StreamedBody {
    type Data = Bytes;
    type Error = RenderError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RenderError>>> {
        let mut piece = String::new();
        for _ in 0..MAX_PARTS {
            match self.0.next() {
                // What others have written does not act on a terminal; JSON stays the same document.
                Some(Ok(part)) => piece.push_str(&escaped(&part)),
                Some(Err(error)) => return Poll::Ready(Some(Err(RenderError(error)))),
                None if piece.is_empty() => return Poll::Ready(None),
                None => break,
            }
            if piece.len() >= PIECE {
                break;
            }
        }
        if piece.is_empty() {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(Frame::data(piece.into()))))
    }
}

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

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn a_page_is_rendered_as_far_as_it_is_read() {
        let rendered = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&rendered);
        let parts = (0..1_000_000).map(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok("x".repeat(1000))
        });
        let mut body = StreamedBody::new(Box::new(parts));
        for piece in 1..=3 {
            let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!((PIECE..PIECE + 1000).contains(&frame.len()));
            assert_eq!(rendered.load(Ordering::Relaxed), piece * 17);
        }
    }

    #[tokio::test]
    async fn empty_parts_end_no_page() {
        let parts = (0..10_000).map(|n| Ok(if n % 1000 == 999 { "x".to_owned() } else { String::new() }));
        let body = StreamedBody::new(Box::new(parts)).collect().await.unwrap();
        assert_eq!(body.to_bytes(), "xxxxxxxxxx");
    }
}
