//! Bodies of responses: short ones, large ones that are made while they are read, and the lines of a trace.
//!
//! Invariant: a reader of a large body costs a piece and references to the state, whatever its size and however slowly it is
//! read. A trace keeps its connection open for as long as the client reads, and ends with its sender.

use std::{error::Error, sync::Arc, task::Poll, time::Duration};

use futures_util::stream::poll_fn;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Frame};
use model::escaped;
use parking_lot::Mutex;
use tokio::{sync::mpsc, time::Instant};

/// From this size on, a piece is handed to the connection, in bytes.
const PIECE: usize = 16 << 10;
/// How many parts are rendered before other connections have their turn: parts may be empty.
const MAX_PARTS: usize = 256;
/// How long a client may read nothing of a trace.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a trace may take to begin: the kernel verifies the programs first.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// The parts of a page in order, each rendered when it is asked for.
pub(crate) type Parts = Box<dyn Iterator<Item = Result<String, String>> + Send>;

pub(crate) type PageBody = UnsyncBoxBody<Bytes, Box<dyn Error + Send + Sync>>;

pub(crate) fn short(text: impl Into<Bytes>) -> PageBody {
    Full::new(text.into()).map_err(Into::into).boxed_unsync()
}

/// A body that is rendered while it is read. If a part cannot be rendered, the response ends without its end.
pub(crate) fn large(parts: Parts) -> PageBody {
    let mut parts = parts.fuse();
    let frames = poll_fn(move |context| {
        let mut piece = String::new();
        for _ in 0..MAX_PARTS {
            match parts.next() {
                // What others have written does not act on a terminal; JSON stays the same document.
                Some(Ok(part)) => piece.push_str(&escaped(&part)),
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
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
    });
    StreamBody::new(frames).boxed_unsync()
}

/// The lines of a trace. It ends with its sender; the sender learns that the client is gone when this is dropped.
pub(crate) fn trace(mut lines: mpsc::Receiver<String>, expiry: Option<Expiry>) -> PageBody {
    let frames = poll_fn(move |context| {
        let lines = lines.poll_recv(context);
        if lines.is_ready() {
            expiry.iter().for_each(|it| it.extend(READ_TIMEOUT));
        }
        lines.map(|it| it.map(|lines| Ok(Frame::data(lines.into()))))
    });
    StreamBody::new(frames).boxed_unsync()
}

/// When a connection is closed unless the client goes on.
#[derive(Clone, Debug)]
pub(crate) struct Expiry(pub(crate) Arc<Mutex<Instant>>);

impl Expiry {
    /// A trace begins.
    pub(crate) fn wait_for_start(&self) {
        self.extend(START_TIMEOUT);
    }

    fn extend(&self, by: Duration) {
        *self.0.lock() = Instant::now() + by;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[tokio::test]
    async fn a_page_is_rendered_as_far_as_it_is_read() {
        let rendered = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&rendered);
        let parts = (0..1_000_000).map(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok("x".repeat(1000))
        });
        let mut body = large(Box::new(parts));
        for piece in 1..=3 {
            let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!((PIECE..PIECE + 1000).contains(&frame.len()));
            assert_eq!(rendered.load(Ordering::Relaxed), piece * 17);
        }
    }

    #[tokio::test]
    async fn empty_parts_end_no_page() {
        let parts = (0..10_000).map(|n| Ok(if n % 1000 == 999 { "x".to_owned() } else { String::new() }));
        let body = large(Box::new(parts)).collect().await.unwrap();
        assert_eq!(body.to_bytes(), "xxxxxxxxxx");
    }
}
