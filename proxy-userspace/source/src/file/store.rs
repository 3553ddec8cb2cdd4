//! The last valid content of every file.
//!
//! Invariant: a file that is invalid, incomplete or being replaced keeps its last valid content.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use model::{Rejected, cluster::ClusterState};
use tokio::time::Instant;

use super::{
    folder, merge,
    parse::{ManifestFormat, ParsedManifest, parse},
};
use crate::snapshot::Snapshot;

/// How long an empty or missing file is assumed to be in the process of being replaced.
pub(super) const GRACE_PERIOD: Duration = Duration::from_millis(200);

/// The files of a source.
#[derive(Debug)]
pub(super) struct FileStore {
    path: PathBuf,
    files: BTreeMap<PathBuf, FileState>,
    /// Why the list of files could not be read the last time.
    list_problem: Option<String>,
}

#[derive(Debug, Default)]
struct FileState {
    /// The signature of the content that was read.
    signature: Option<Signature>,
    last_valid: Option<Arc<ParsedManifest>>,
    problem: Option<String>,
    /// Since when the file is missing from its folder.
    missing_since: Option<Instant>,
    /// Since when the file is empty, until that is reported.
    empty_since: Option<Instant>,
}

/// Device, inode, size, mtime and ctime: differs after every change of a file.
type Signature = (u64, u64, u64, i64, i64, i64, i64);

fn signature(path: &Path) -> io::Result<Signature> {
    let it = fs::metadata(path)?;
    Ok((it.dev(), it.ino(), it.size(), it.mtime(), it.mtime_nsec(), it.ctime(), it.ctime_nsec()))
}

impl FileStore {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, files: BTreeMap::new(), list_problem: None }
    }

    /// Reads the changed files, and in any case those in `touched`. Returns whether the snapshot may have changed.
    pub(super) fn refresh(&mut self, touched: &BTreeSet<PathBuf>, now: Instant) -> bool {
        let listed = match folder::list(&self.path) {
            Ok(listed) => listed,
            Err(error) => {
                let problem = format!("{}: {error}; the last content stays active", self.path.display());
                return self.list_problem.replace(problem) != self.list_problem;
            }
        };
        let mut has_changed = self.list_problem.take().is_some();
        for path in &listed {
            let file = self.files.entry(path.clone()).or_default();
            has_changed |= file.refresh(path, touched.contains(path), now);
        }
        for (path, file) in &mut self.files {
            if !listed.contains(path) {
                file.missing_since.get_or_insert(now);
                file.signature = None;
            }
        }
        let count = self.files.len();
        self.files.retain(|path, it| {
            let is_replaced = || it.missing_since.is_some_and(|since| now < since + GRACE_PERIOD);
            listed.contains(path) || (it.last_valid.is_some() && is_replaced())
        });
        has_changed || self.files.len() < count
    }

    /// When a grace period ends, so that the files must be checked even without a change.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        // While the folder itself cannot be listed, missing files are not assumed to be deleted.
        let missing = self.files.values().filter_map(|it| it.missing_since);
        let empty = self.files.values().filter_map(|it| it.empty_since);
        missing.chain(empty).min().filter(|_| self.list_problem.is_none()).map(|since| since + GRACE_PERIOD)
    }

    /// The content of all files; `None` if there are files and none of them has ever been valid.
    pub(super) fn snapshot(&self, previous: &ClusterState) -> Option<Snapshot> {
        if !self.files.is_empty() && self.files.values().all(|it| it.last_valid.is_none()) {
            return None;
        }
        let parsed = self.files.iter();
        let parsed = parsed.filter_map(|(path, it)| Some((path.as_path(), &**it.last_valid.as_ref()?)));
        let mut snapshot = merge::merge(parsed, previous);
        snapshot.problems.extend(self.problems());
        if self.files.is_empty() && self.list_problem.is_none() {
            let reason = format!("the folder has no manifests; expected are {}", folder::PATTERNS);
            snapshot.rejected.push(Rejected { item: self.path.display().to_string(), reason });
        }
        Some(snapshot)
    }

    /// The errors of the files.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        self.list_problem.iter().chain(self.files.values().filter_map(|it| it.problem.as_ref())).cloned()
    }
}

impl FileState {
    /// Reads the file if it has changed; returns whether it was read, or should have been.
    fn refresh(&mut self, path: &Path, is_touched: bool, now: Instant) -> bool {
        self.missing_since = None;
        let signature = signature(path).ok();
        if signature.is_some() && signature == self.signature && !is_touched && self.empty_since.is_none() {
            return false;
        }
        let empty_since = self.empty_since.take();
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.signature = None;
                self.problem = Some(format!("{}: {error}; {}", path.display(), self.consequence()));
                return true;
            }
        };
        self.signature = signature;
        // Editors, and `>` in a shell, truncate a file some time before they write it.
        let had_objects = self.last_valid.as_ref().is_some_and(|it| !it.objects.is_empty());
        if bytes.trim_ascii().is_empty() && had_objects {
            let since = empty_since.unwrap_or(now);
            if now < since + GRACE_PERIOD {
                self.empty_since = Some(since);
            } else {
                let (path, consequence) = (path.display(), self.consequence());
                self.problem = Some(format!(
                    "{path}: empty; {consequence}; write a `kind: List` with `items: []` to remove its objects"
                ));
            }
            return true;
        }
        match parse(&path.display().to_string(), &bytes, ManifestFormat::of(path)) {
            Ok(parsed) => {
                self.last_valid = Some(Arc::new(parsed));
                self.problem = None;
            }
            Err(error) => self.problem = Some(format!("{error}; {}", self.consequence())),
        }
        true
    }

    fn consequence(&self) -> &'static str {
        match self.last_valid {
            Some(_) => "its last valid content stays active",
            None => "none of its objects are served",
        }
    }
}
