//! What every file said when it last made sense.
//!
//! The one rule: a file that is broken, half-written or just being replaced goes on meaning what it meant.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use model::cluster::{ClusterState, Rejected};
use tokio::time::Instant;

use super::{
    folder, merge,
    parse::{ManifestFormat, ParsedManifest, parse},
};
use crate::Snapshot;

/// How long a file that is empty, or gone from its folder, is taken to be in the middle of being replaced.
pub(super) const GRACE: Duration = Duration::from_millis(200);

/// The files of a source.
#[derive(Debug)]
pub(super) struct Store {
    path: PathBuf,
    files: BTreeMap<PathBuf, File>,
    /// Why the list of files could not be read, the last time.
    unlisted: Option<String>,
}

#[derive(Debug, Default)]
struct File {
    seen: Option<Signature>,
    good: Option<Arc<ParsedManifest>>,
    problem: Option<String>,
    /// Since when it is gone from its folder.
    gone: Option<Instant>,
    /// Since when it is empty, until it is complained about.
    empty: Option<Instant>,
}

/// What changes whenever a file does.
type Signature = (u64, u64, u64, i64, i64, i64, i64);

fn signature(path: &Path) -> io::Result<Signature> {
    let it = fs::metadata(path)?;
    Ok((it.dev(), it.ino(), it.size(), it.mtime(), it.mtime_nsec(), it.ctime(), it.ctime_nsec()))
}

impl Store {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, files: BTreeMap::new(), unlisted: None }
    }

    /// Reads what has changed since the last time, and in any case the files in `touched`. Whether the snapshot may be
    /// another one since.
    pub(super) fn refresh(&mut self, touched: &BTreeSet<PathBuf>, now: Instant) -> bool {
        let listed = match folder::list(&self.path) {
            Ok(listed) => listed,
            Err(error) => {
                let problem = format!("{}: {error}; what was read before is kept", self.path.display());
                return self.unlisted.replace(problem) != self.unlisted;
            }
        };
        let mut changed = self.unlisted.take().is_some();
        for path in &listed {
            let file = self.files.entry(path.clone()).or_default();
            changed |= file.refresh(path, touched.contains(path), now);
        }
        for (path, file) in &mut self.files {
            if !listed.contains(path) {
                file.gone.get_or_insert(now);
                file.seen = None;
            }
        }
        let before = self.files.len();
        self.files.retain(|path, it| {
            listed.contains(path) || (it.good.is_some() && it.gone.is_some_and(|since| now < since + GRACE))
        });
        changed || self.files.len() < before
    }

    /// When to look again although nothing may have changed by then.
    pub(super) fn next_look(&self) -> Option<Instant> {
        // While the folder itself is gone, so is the reason to believe that its files are.
        let gone = self.files.values().filter_map(|it| it.gone);
        let empty = self.files.values().filter_map(|it| it.empty);
        gone.chain(empty).min().filter(|_| self.unlisted.is_none()).map(|since| since + GRACE)
    }

    /// Everything the files say; none if there are files and none of them has ever made sense.
    pub(super) fn snapshot(&self, before: &ClusterState) -> Option<Snapshot> {
        if !self.files.is_empty() && self.files.values().all(|it| it.good.is_none()) {
            return None;
        }
        let parsed = self.files.iter().filter_map(|(path, it)| Some((path.as_path(), &**it.good.as_ref()?)));
        let mut snapshot = merge::merge(parsed, before);
        snapshot.problems.extend(self.problems());
        if self.files.is_empty() && self.unlisted.is_none() {
            let reason = format!("there is no manifest in it; call them {}", folder::PATTERNS);
            snapshot.rejected.push(Rejected { item: self.path.display().to_string(), reason });
        }
        Some(snapshot)
    }

    /// What is wrong with the files.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        self.unlisted.iter().chain(self.files.values().filter_map(|it| it.problem.as_ref())).cloned()
    }
}

impl File {
    /// Whether it was read, or should have been.
    fn refresh(&mut self, path: &Path, touched: bool, now: Instant) -> bool {
        self.gone = None;
        let signature = signature(path).ok();
        if signature.is_some() && signature == self.seen && !touched && self.empty.is_none() {
            return false;
        }
        let empty = self.empty.take();
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.seen = None;
                self.problem = Some(format!("{}: {error}; {}", path.display(), self.consequence()));
                return true;
            }
        };
        self.seen = signature;
        // Editors and `>` of a shell empty a file before they write it, who knows how long before.
        let meant_something = self.good.as_ref().is_some_and(|it| !it.objects.is_empty());
        if bytes.trim_ascii().is_empty() && meant_something {
            let since = empty.unwrap_or(now);
            if now < since + GRACE {
                self.empty = Some(since);
            } else {
                let (path, consequence) = (path.display(), self.consequence());
                self.problem = Some(format!(
                    "{path}: empty; {consequence}: write a `kind: List` with `items: []` to mean nothing"
                ));
            }
            return true;
        }
        match parse(&path.display().to_string(), &bytes, ManifestFormat::of(path)) {
            Ok(parsed) => {
                self.good = Some(Arc::new(parsed));
                self.problem = None;
            }
            Err(error) => self.problem = Some(format!("{error}; {}", self.consequence())),
        }
        true
    }

    fn consequence(&self) -> &'static str {
        match self.good {
            Some(_) => "what the file said before is kept",
            None => "nothing of the file is served",
        }
    }
}
