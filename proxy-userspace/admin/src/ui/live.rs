//! What answers the page: one question at a time.
//!
//! Invariant: what is kept for the page is forgotten once no browser asks.

use std::{sync::Arc, time::Duration};

use hyper::StatusCode;
use parking_lot::Mutex;
use tokio::{
    sync::Mutex as AsyncMutex,
    task::spawn_blocking,
    time::{Instant, sleep},
};

use super::{
    board::Board,
    view::{self, Question},
};
use crate::{
    pages::explain,
    state::{AdminState, Moment},
};

/// How long after the last question the rates are kept.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// What answers the page. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Ui {
    /// What browsers look at; questions take turns.
    pub(super) watched: Arc<AsyncMutex<Option<Watched>>>,
    /// Explanations take turns.
    explaining: Arc<AsyncMutex<()>>,
}

/// A board, and when a browser last asked for it.
pub(super) struct Watched {
    board: Board,
    at: Instant,
}

impl Ui {
    /// The answer to the question in a query, as JSON.
    pub(crate) async fn live(&self, state: Arc<Mutex<AdminState>>, query: &str) -> Result<String, String> {
        let question = Question::parse(query);
        let mut watched = Arc::clone(&self.watched).lock_owned().await;
        let now = Instant::now();
        if watched.is_none() {
            tokio::spawn(forget_when_idle(Arc::clone(&self.watched)));
        }
        let answer = spawn_blocking(move || {
            let it = watched.get_or_insert_with(|| Watched { board: Board::default(), at: now });
            it.at = now;
            answer(&state, &mut it.board, &question, now)
        });
        answer.await.map_err(|it| it.to_string())
    }

    /// An explanation of how connections are made, or the status and why there is none.
    pub(crate) async fn explain(
        &self,
        state: &Mutex<AdminState>,
        query: &str,
    ) -> Result<String, (StatusCode, String)> {
        let explainer = state.lock().readers.kernel_explainer.clone();
        let _turn = self.explaining.lock().await;
        explain::answer(explainer, query).await
    }
}

/// Reads the counters if that is due, and answers.
fn answer(state: &Mutex<AdminState>, board: &mut Board, question: &Question, now: Instant) -> String {
    let (published, counter_source) = {
        let state = state.lock();
        (state.served(), state.readers.counters.clone().filter(|_| state.readers.has_sockets))
    };
    board.set_state(published);
    if board.is_due(now) {
        // This takes a while.
        board.update(counter_source.and_then(|it| it()), Instant::now());
    }
    view::answer(&state.lock(), board, question, Moment::now())
}

/// Forgets what no browser has asked for in a while.
async fn forget_when_idle(watched: Arc<AsyncMutex<Option<Watched>>>) {
    loop {
        sleep(IDLE_TIMEOUT).await;
        let mut watched = watched.lock().await;
        if watched.as_ref().is_none_or(|it| it.at.elapsed() >= IDLE_TIMEOUT) {
            *watched = None;
            return;
        }
    }
}
