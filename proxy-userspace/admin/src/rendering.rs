//! Slow and large pages, rendered once for all who read them.
//!
//! Invariant: at most two renderings exist at a time, whether they are being made or read; a reader costs a chunk.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, Weak},
    task::{Context, Poll},
    time::Duration,
};

use hyper::body::{Body, Bytes, Frame, SizeHint};
use tokio::{
    sync::{Mutex as AsyncMutex, Semaphore},
    task::spawn_blocking,
    time::{Instant, sleep},
};

use crate::state::lock;

/// How many renderings exist at a time.
const MAX_RENDERINGS: usize = 2;
/// Until this age, a rendering is not discarded while it is being read.
const MIN_READING_TIME: Duration = Duration::from_secs(1);
/// How often a new rendering looks whether there is room.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How much of a rendering is handed to a connection at a time, in bytes.
const CHUNK: usize = 16 << 10;

/// A page that is rendered once for all readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RenderedPage {
    Metrics,
    State,
    Status,
}

/// Makes renderings.
#[derive(Debug)]
pub(crate) struct Renderer {
    /// One per rendering that is being made.
    permits: Arc<Semaphore>,
    /// By page: readers of a page wait for each other's rendering, which they may share.
    turns: [AsyncMutex<()>; 3],
    made: Mutex<Vec<Made>>,
}

/// A rendering that is being read; ordered by age.
#[derive(Debug)]
struct Made {
    page: RenderedPage,
    revision: Option<(u64, u64)>,
    started: Instant,
    rendering: Weak<Rendering>,
}

/// The text of a page, until it is discarded.
#[derive(Debug)]
struct Rendering(Mutex<Option<Bytes>>);

impl Default for Renderer {
    fn default() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(MAX_RENDERINGS)),
            turns: Default::default(),
            made: Mutex::default(),
        }
    }
}

impl Renderer {
    /// The text of a page: of this instance and revision, or, if there is none, of a moment after this call.
    pub(crate) async fn page(
        &self,
        page: RenderedPage,
        revision: Option<(u64, u64)>,
        render: impl FnOnce() -> Result<String, String> + Send + 'static,
    ) -> Result<RenderingBody, String> {
        let arrived = Instant::now();
        let _turn = self.turns[page as usize].lock().await;
        let is_wanted = |it: &Made| {
            it.page == page && it.revision == revision && (revision.is_some() || it.started >= arrived)
        };
        let shared = lock(&self.made).iter().filter(|it| is_wanted(it)).find_map(|it| it.rendering.upgrade());
        if let Some(body) = shared.and_then(RenderingBody::new) {
            return Ok(body);
        }
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|it| it.to_string())?;
        self.make_room().await;
        let started = Instant::now();
        // A reader that disconnects does not end its rendering, which keeps the permit.
        let rendered = spawn_blocking(move || (render(), permit)).await;
        let (text, permit) = rendered.map_err(|it| it.to_string())?;
        let rendering = Arc::new(Rendering(Mutex::new(Some(text?.into()))));
        lock(&self.made).push(Made { page, revision, started, rendering: Arc::downgrade(&rendering) });
        drop(permit);
        RenderingBody::new(rendering).ok_or_else(|| "discarded".to_owned())
    }

    /// Waits until those that are being made and those that are being read are together at most the limit; discards the
    /// oldest if their readers take too long.
    async fn make_room(&self) {
        loop {
            {
                let mut made = lock(&self.made);
                made.retain(|it| it.rendering.upgrade().is_some_and(|it| lock(&it.0).is_some()));
                let being_made = MAX_RENDERINGS - self.permits.available_permits();
                if made.len() + being_made <= MAX_RENDERINGS {
                    return;
                }
                if made[0].started.elapsed() >= MIN_READING_TIME {
                    let oldest = made.remove(0);
                    if let Some(rendering) = oldest.rendering.upgrade() {
                        *lock(&rendering.0) = None;
                        tracing::debug!(
                            "discarded a rendering of the {:?} page, which was not read in time",
                            oldest.page
                        );
                    }
                    continue;
                }
            }
            sleep(POLL_INTERVAL).await;
        }
    }
}

/// The body of a response: what one reader has not read yet of a rendering.
#[derive(Debug)]
pub(crate) struct RenderingBody {
    rendering: Arc<Rendering>,
    position: usize,
    length: usize,
}

/// A rendering was discarded before it was read to its end.
#[derive(Debug)]
pub(crate) struct Discarded;

impl std::fmt::Display for Discarded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the page was not read in time")
    }
}

impl std::error::Error for Discarded {}

impl RenderingBody {
    /// `None` if it was discarded.
    fn new(rendering: Arc<Rendering>) -> Option<Self> {
        let length = lock(&rendering.0).as_ref()?.len();
        Some(Self { rendering, position: 0, length })
    }
}

impl Body for RenderingBody {
    type Data = Bytes;
    type Error = Discarded;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Discarded>>> {
        if self.is_end_stream() {
            return Poll::Ready(None);
        }
        let end = self.length.min(self.position + CHUNK);
        // Copied, so that a connection that is not read holds no more than this.
        let chunk =
            lock(&self.rendering.0).as_ref().map(|it| Bytes::copy_from_slice(&it[self.position..end]));
        self.position = end;
        Poll::Ready(Some(chunk.map(Frame::data).ok_or(Discarded)))
    }

    fn is_end_stream(&self) -> bool {
        self.position == self.length
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact((self.length - self.position) as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http_body_util::BodyExt as _;

    use super::*;

    /// A page of 100,000 bytes; counts how often it is rendered, and how many are at the same time.
    #[derive(Clone, Default)]
    struct Pages {
        renderer: Arc<Renderer>,
        rendered: Arc<AtomicUsize>,
        running: Arc<AtomicUsize>,
        most: Arc<AtomicUsize>,
    }

    impl Pages {
        async fn get(&self, page: RenderedPage, revision: Option<(u64, u64)>) -> RenderingBody {
            let it = self.clone();
            let render = move || {
                let running = it.running.fetch_add(1, Ordering::SeqCst) + 1;
                it.most.fetch_max(running, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(5));
                it.running.fetch_sub(1, Ordering::SeqCst);
                it.rendered.fetch_add(1, Ordering::SeqCst);
                Ok("x".repeat(100_000))
            };
            self.renderer.page(page, revision, render).await.unwrap()
        }

        /// How many renderings exist.
        fn kept(&self) -> usize {
            let made = lock(&self.renderer.made);
            let renderings = made.iter().filter_map(|it| it.rendering.upgrade());
            renderings.filter(|it| lock(&it.0).is_some()).count()
        }
    }

    #[tokio::test]
    async fn readers_of_one_state_share_its_rendering() {
        let pages = Pages::default();
        let mut bodies = Vec::new();
        for _ in 0..60 {
            bodies.push(pages.get(RenderedPage::State, Some((1, 7))).await);
        }
        assert_eq!((pages.rendered.load(Ordering::SeqCst), pages.kept()), (1, 1));
        for body in bodies {
            assert_eq!(body.collect().await.unwrap().to_bytes().len(), 100_000);
        }
        assert_eq!(pages.kept(), 0, "nothing is kept without a reader");
    }

    #[tokio::test]
    async fn readers_that_come_while_a_page_is_rendered_share_the_next_rendering() {
        let pages = Pages::default();
        let readers: Vec<_> = (0..60)
            .map(|_| {
                let pages = pages.clone();
                tokio::spawn(async move { pages.get(RenderedPage::Metrics, None).await })
            })
            .collect();
        for it in readers {
            it.await.unwrap();
        }
        assert!(pages.rendered.load(Ordering::SeqCst) <= 2);
    }

    #[tokio::test]
    async fn renderings_that_nobody_reads_are_discarded_for_new_ones() {
        let pages = Pages::default();
        let mut bodies = Vec::new();
        for revision in 0..4 {
            bodies.push(pages.get(RenderedPage::State, Some((1, revision))).await);
            assert!(pages.kept() <= MAX_RENDERINGS);
        }
        let last = bodies.pop().unwrap();
        assert_eq!(last.collect().await.unwrap().to_bytes().len(), 100_000);
        assert!(bodies.swap_remove(0).collect().await.is_err(), "its reader gets an error");
    }

    #[tokio::test]
    async fn two_renderings_are_made_at_a_time() {
        let pages = Pages::default();
        let readers: Vec<_> = (0..30_u64)
            .map(|n| {
                let pages = pages.clone();
                let page = [RenderedPage::Metrics, RenderedPage::State, RenderedPage::Status][n as usize % 3];
                tokio::spawn(async move { drop(pages.get(page, Some((1, n))).await) })
            })
            .collect();
        for it in readers {
            it.await.unwrap();
        }
        assert_eq!(pages.rendered.load(Ordering::SeqCst), 30);
        assert!(pages.most.load(Ordering::SeqCst) <= MAX_RENDERINGS);
    }
}
