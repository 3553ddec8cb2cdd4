//! The test harness: a brain, a backend that follows it, and the expected answers.

use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    thread::sleep,
    time::{Duration, Instant},
};

use model::{Protocol, state::NodeState};

use crate::{
    Interface, RunError, RunOptions,
    backend::Backend,
    brain::Brain,
    generate,
    lines::{self, LineBackend},
    oracle::{self, Answer, Lookup},
    packets::PacketBackend,
    wait::Wait,
};

/// The interval at which the backend is asked whether a state is applied.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The limit of wrong answers that are reported of a case.
const MAX_REPORTED: usize = 5;

/// The number of harnesses of this process so far: each has a folder.
static HARNESSES: AtomicUsize = AtomicUsize::new(0);

/// A brain, a backend that follows it, and what was published.
pub(crate) struct Harness<'a> {
    options: &'a RunOptions,
    folder: PathBuf,
    brain: Option<Brain>,
    backend: Option<Box<dyn Backend>>,
    marker: u16,
    state: NodeState,
    /// Questions about former states, which may be unmatched by now.
    asked: BTreeSet<Lookup>,
    pub(crate) questions: usize,
    pub(crate) wait: Wait<'a>,
}

impl<'a> Harness<'a> {
    pub(crate) fn start(options: &'a RunOptions, progress: &'a dyn Fn(&str)) -> Result<Self, RunError> {
        let number = HARNESSES.fetch_add(1, Ordering::Relaxed);
        let name = format!("backend-conformance-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let mut harness = Self {
            options,
            folder,
            brain: None,
            backend: None,
            marker: 0,
            state: NodeState::default(),
            asked: BTreeSet::new(),
            questions: 0,
            wait: Wait::new(options.timeout, progress),
        };
        harness.start_brain()?;
        harness.start_backend()?;
        Ok(harness)
    }

    pub(crate) fn begin_case(&mut self, name: &'a str) {
        self.questions = 0;
        self.wait.begin_case(name);
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("proxy.sock")
    }

    /// A brain with a new instance, and without a state.
    pub(crate) fn start_brain(&mut self) -> Result<(), RunError> {
        self.brain = Some(Brain::start(&self.socket())?);
        Ok(())
    }

    pub(crate) fn kill_brain(&mut self) {
        if let Some(brain) = self.brain.take() {
            brain.kill();
        }
    }

    /// Replaces the backend; after a failed case, so that the others are not affected.
    pub(crate) fn restart_backend(&mut self) -> Result<(), RunError> {
        self.backend = None;
        self.start_backend()?;
        self.asked.clear();
        Ok(())
    }

    fn start_backend(&mut self) -> Result<(), RunError> {
        let RunOptions { command, interface, .. } = self.options;
        let command = lines::command(command, &self.socket());
        self.backend = Some(match interface {
            Interface::Lines => Box::new(LineBackend::start(command)?),
            _ => Box::new(PacketBackend::start(command, self.options, &self.socket())?),
        });
        Ok(())
    }

    /// Publishes a state, without waiting for it.
    pub(crate) fn publish(&mut self, state: NodeState) {
        self.marker += 1;
        let mut marked = state.clone();
        marked.services.insert(generate::marker(self.marker));
        if let Some(brain) = &self.brain {
            brain.publish(marked);
        }
        self.state = state;
    }

    /// Waits until the last published state is applied: the marker's endpoint is that of the state.
    pub(crate) fn applied(&mut self) -> Result<(), String> {
        let marker = generate::marker(self.marker);
        let state = NodeState { services: [marker].into_iter().collect(), ..NodeState::default() };
        let question = Lookup::new([10, 255, 0, 9].into(), ([198, 18, 0, 1], 80).into(), Protocol::Tcp);
        // What a backend does for sockets and for packets may not be in step.
        self.is_answered(&state, question)?;
        self.is_answered(&state, question.asked_from_outside())
    }

    /// Waits until a question is answered by a state.
    fn is_answered(&mut self, state: &NodeState, question: Lookup) -> Result<(), String> {
        let expected = oracle::answer(state, &question);
        let begin = Instant::now();
        loop {
            let (answer, is_right) = self.ask(&question, &expected)?;
            if is_right {
                return Ok(());
            }
            if self.wait.is_over(begin) {
                let timeout = self.wait.seconds();
                return Err(format!(
                    "the state was not applied within {timeout} s: `{question}` is still answered by {answer:?}, not \
                     {expected}"
                ));
            }
            sleep(POLL_INTERVAL);
        }
    }

    /// The answer to a question, and whether it is right.
    fn ask(&mut self, question: &Lookup, expected: &Answer) -> Result<(String, bool), String> {
        self.questions += 1;
        let backend = self.backend.as_mut().ok_or("there is no backend")?;
        let answer = backend.ask(question, expected, &mut self.wait)?;
        let is_right = expected.accepts(&answer, backend.tolerance(question));
        Ok((answer, is_right))
    }

    /// The answer to a question beside the right one, if it is wrong.
    fn wrong(&mut self, question: &Lookup, expected: &Answer) -> Result<Option<String>, String> {
        let (answer, is_right) = self.ask(question, expected)?;
        Ok((!is_right).then(|| format!("{question}: {answer:?}, not {expected}")))
    }

    /// Publishes a state, and checks every answer once it is applied, also about what was asked before.
    pub(crate) fn check(&mut self, state: NodeState) -> Result<(), String> {
        let lookups = oracle::all_lookups(&state);
        self.publish(state);
        self.applied()?;
        self.check_answers(&lookups)
    }

    /// Checks the answers to these questions and to all that were asked before.
    pub(crate) fn check_answers(&mut self, lookups: &BTreeSet<Lookup>) -> Result<(), String> {
        self.asked.extend(lookups);
        let mut wrong = Vec::new();
        let mut count = 0;
        for lookup in std::mem::take(&mut self.asked) {
            let skips = &self.options.skips;
            if lookup.features().any(|it| skips.reason(it).is_some()) {
                continue;
            }
            let expected = oracle::answer(&self.state, &lookup);
            if let Some(it) = self.wrong(&lookup, &expected)? {
                count += 1;
                wrong.push(it);
                wrong.truncate(MAX_REPORTED);
            }
            // What is unmatched need not be asked again.
            if !expected.is_unmatched() {
                self.asked.insert(lookup);
            }
        }
        if count == 0 {
            return Ok(());
        }
        if count > wrong.len() {
            wrong.push(format!("and {} more wrong answers", count - wrong.len()));
        }
        Err(wrong.join("\n"))
    }

    /// The first answer that is not that of a state.
    pub(crate) fn first_wrong(
        &mut self,
        state: &NodeState,
        lookups: &BTreeSet<Lookup>,
    ) -> Result<Option<String>, String> {
        for lookup in lookups {
            if let Some(it) = self.wrong(lookup, &oracle::answer(state, lookup))? {
                return Ok(Some(it));
            }
        }
        Ok(None)
    }
}

impl Drop for Harness<'_> {
    fn drop(&mut self) {
        self.backend = None;
        self.kill_brain();
        // It holds a socket at most, which the brain has removed.
        let _ = fs::remove_dir(&self.folder);
    }
}
