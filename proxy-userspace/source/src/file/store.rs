//! The last valid content of every file.
//!
//! Invariant: a file that is invalid, incomplete or being replaced keeps its last valid content.
//! A changed file costs its own size, whatever the number of files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io, mem,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use model::{
    Rejected, RequestedMetadata,
    cluster::{ClusterChanges, ObjectName},
};
use tokio::time::Instant;

use super::{
    documents::{ParseError, Position},
    folder,
    objects::Objects,
    parse::ParsedManifest,
    watch::Touched,
};

/// How long an empty or missing file is assumed to be in the process of being replaced.
pub(super) const GRACE_PERIOD: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct FileStore {
    path: PathBuf,
    requested: RequestedMetadata,
    is_folder: bool,
    pub(super) files: BTreeMap<Arc<Path>, FileState>,
    objects: Objects,
    /// The changes of the objects that were not handed over yet.
    pub(super) changes: ClusterChanges,
    /// The files that are missing or empty, and since when.
    unsettled: BTreeMap<Arc<Path>, Instant>,
    /// The files about which there is something to report.
    reported: BTreeSet<Arc<Path>>,
    /// Why the folder could not be listed the last time.
    list_problem: Option<Rejected>,
    /// The time of the last refresh.
    now: Instant,
}

#[derive(Debug, Default)]
pub(super) struct FileState {
    /// The signature of the content that was read.
    signature: Option<Signature>,
    /// The last valid content.
    contents: Option<ParsedManifest>,
    problem: Option<Rejected>,
    is_link: bool,
    has_duplicates: bool,
}

/// Device, inode, size, mtime and ctime: differs after every change of a file.
type Signature = (u64, u64, u64, i64, i64, i64, i64);

fn signature(it: &fs::Metadata) -> Signature {
    (it.dev(), it.ino(), it.size(), it.mtime(), it.mtime_nsec(), it.ctime(), it.ctime_nsec())
}

/// What is wrong with the files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileReport {
    /// Rejected parts of objects; the rest of these objects is served.
    pub rejected: Vec<Rejected>,
    /// Files that cannot be read or parsed, and objects that are defined twice or not supported.
    pub problems: Vec<Rejected>,
}

impl FileStore {
    pub(super) fn new(path: PathBuf, requested: RequestedMetadata) -> Self {
        Self {
            path,
            requested,
            is_folder: false,
            files: BTreeMap::new(),
            objects: Objects::default(),
            changes: ClusterChanges::default(),
            unsettled: BTreeMap::new(),
            reported: BTreeSet::new(),
            list_problem: None,
            now: Instant::now(),
        }
    }

    /// Reads the changed files; a touched one even if it looks unchanged.
    pub(super) fn refresh(&mut self, touched: &Touched, now: Instant) {
        self.now = now;
        let due = self.expired();
        // If the folder itself is missing, its files are not assumed to be deleted.
        let is_missing = || !fs::metadata(&self.path).is_ok_and(|it| it.is_dir());
        if touched.all || !self.is_folder || self.list_problem.is_some() || (!due.is_empty() && is_missing())
        {
            self.sweep(touched);
        } else {
            let links = self.files.iter().filter(|(_, it)| touched.links && it.is_link);
            let links: Vec<_> = links.map(|(path, _)| Arc::clone(path)).collect();
            due.iter().chain(&links).for_each(|it| self.check(it, false));
            touched.paths.iter().for_each(|it| self.check(it, true));
        }
        self.remove_missing();
    }

    /// When a grace period ends, so that the files must be checked even without a change.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.unsettled.values().map(|since| *since + GRACE_PERIOD).filter(|it| *it > self.now).min()
    }

    /// Whether there is a state: not if there are files and none of them has ever been valid.
    pub(super) fn is_ready(&self) -> bool {
        self.files.is_empty() || self.files.values().any(|it| it.contents.is_some())
    }

    pub(super) fn report(&self) -> FileReport {
        let mut report = FileReport::default();
        report.problems.extend(self.list_problem.clone());
        for (path, file) in self.reported.iter().filter_map(|it| self.files.get_key_value(it)) {
            report.problems.extend(file.problem.clone());
            if let Some(contents) = &file.contents {
                report.add(path, contents);
            }
        }
        report.problems.extend(self.duplicates());
        if self.files.is_empty() && self.list_problem.is_none() {
            let reason = format!("the folder has no manifests; expected are {}", folder::PATTERNS);
            report.rejected.push(Rejected::not_served(self.path.display().to_string(), reason));
        }
        report
    }

    fn duplicates(&self) -> Vec<Rejected> {
        let mut files: BTreeSet<_> = self
            .reported
            .iter()
            .filter(|it| self.files.get(*it).is_some_and(|it| it.has_duplicates))
            .collect();
        let mut ambiguous = BTreeSet::new();
        for (name, paths) in self.objects.ambiguous() {
            // A missing file may have been renamed.
            let paths: Vec<_> = paths.filter(|it| !self.unsettled.contains_key(*it)).collect();
            if paths.len() > 1 {
                ambiguous.insert(name);
                files.extend(paths);
            }
        }
        let mut definitions: BTreeMap<ObjectName, Vec<(&Path, Position)>> = BTreeMap::new();
        for path in files {
            let Some(FileState { contents: Some(contents), has_duplicates, .. }) = self.files.get(path)
            else {
                continue;
            };
            for (at, object) in &contents.objects {
                let name = object.name();
                if *has_duplicates || ambiguous.contains(&name) {
                    definitions.entry(name).or_default().push((path, *at));
                }
            }
        }
        let mut problems = Vec::new();
        for (name, places) in definitions {
            problems.extend(places.windows(2).map(|it| {
                let [(first, first_at), (path, at)] = [it[0], it[1]];
                let first = first.display();
                let reason = format!(
                    "{name} is also defined in {first}, {first_at}; this definition is used, remove the other"
                );
                problem(path, Some(at), reason)
            }));
        }
        problems
    }

    /// Checks every file.
    fn sweep(&mut self, touched: &Touched) {
        let listed = match folder::list(&self.path) {
            Ok((is_folder, paths)) => {
                self.is_folder = is_folder;
                paths
            }
            Err(error) => {
                let reason = format!("{error}; the last content stays active");
                self.list_problem = Some(problem(&self.path, None, reason));
                // Files that are missing now have another grace period once the folder exists.
                for path in mem::take(&mut self.unsettled).into_keys() {
                    self.files.entry(path).or_default().signature = None;
                }
                return;
            }
        };
        self.list_problem = None;
        for path in &listed {
            self.check(path, touched.paths.contains(path));
        }
        let is_gone = |it: &Arc<Path>| {
            listed.binary_search_by(|listed| listed.as_os_str().cmp(it.as_os_str())).is_err()
        };
        for path in self.files.keys().filter(|it| is_gone(it)).cloned().collect::<Vec<_>>() {
            self.missing(path);
        }
    }

    /// Reads a file if it has changed.
    fn check(&mut self, path: &Path, is_touched: bool) {
        let path = self.files.get_key_value(path).map_or_else(|| path.into(), |(path, _)| Arc::clone(path));
        let link = fs::symlink_metadata(&path);
        let is_link = link.as_ref().is_ok_and(fs::Metadata::is_symlink);
        let metadata = if is_link { fs::metadata(&path) } else { link };
        if metadata.as_ref().is_ok_and(|it| !it.is_file()) {
            return self.missing(path);
        }
        let bytes = metadata.and_then(|metadata| {
            let file = self.files.entry(Arc::clone(&path)).or_default();
            let signature = Some(signature(&metadata));
            if signature == file.signature && !is_touched && !self.unsettled.contains_key(&path) {
                return Ok(None);
            }
            (file.signature, file.is_link) = (signature, is_link);
            fs::read(&path).map(Some)
        });
        match bytes {
            Ok(None) => {}
            Ok(Some(bytes)) => self.read(path, &bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.missing(path),
            Err(error) => {
                self.unsettled.remove(&path);
                let file = self.files.entry(Arc::clone(&path)).or_default();
                file.signature = None;
                file.problem = Some(problem(&path, None, format!("{error}; {}", file.consequence())));
                self.reported.insert(path);
            }
        }
    }

    /// Takes over the content of a file, if it is valid.
    fn read(&mut self, path: Arc<Path>, bytes: &[u8]) {
        let file = self.files.entry(Arc::clone(&path)).or_default();
        let nothing = ParsedManifest::default();
        let before = file.contents.as_ref().unwrap_or(&nothing);
        // Editors, and `>` in a shell, truncate a file some time before they write it.
        if bytes.trim_ascii().is_empty() && !before.objects.is_empty() {
            let since = *self.unsettled.entry(Arc::clone(&path)).or_insert(self.now);
            if self.now < since + GRACE_PERIOD {
                return;
            }
            let remedy = "write a `kind: List` with `items: []` to remove its objects";
            file.problem = Some(problem(&path, None, format!("empty; {}; {remedy}", file.consequence())));
        } else {
            match ParsedManifest::read(bytes, &self.requested) {
                Ok(mut contents) => {
                    file.has_duplicates =
                        self.objects.replace(&path, before, &mut contents, &mut self.changes);
                    file.contents = Some(contents);
                    file.problem = None;
                }
                Err(ParseError { at, reason }) => {
                    let reason = format!("{reason}; {}", file.consequence());
                    file.problem = Some(problem(&path, Some(at), reason));
                }
            }
        }
        self.unsettled.remove(&path);
        let has_remarks = file.contents.as_ref().is_some_and(ParsedManifest::has_remarks);
        if file.problem.is_some() || file.has_duplicates || has_remarks {
            self.reported.insert(path);
        } else {
            self.reported.remove(&path);
        }
    }

    /// A file is not there, perhaps only for a moment.
    fn missing(&mut self, path: Arc<Path>) {
        match self.files.get_mut(&path) {
            Some(file) if file.contents.is_some() => {
                file.signature = None;
                self.unsettled.entry(path).or_insert(self.now);
            }
            Some(_) => self.remove(&path),
            None => {}
        }
    }

    /// The files whose grace period has ended.
    fn expired(&self) -> Vec<Arc<Path>> {
        let expired = self.unsettled.iter().filter(|(_, since)| self.now >= **since + GRACE_PERIOD);
        expired.map(|(path, _)| Arc::clone(path)).collect()
    }

    /// Removes the files that stay missing, unless only invalid ones would be left.
    fn remove_missing(&mut self) {
        let expired = self.expired();
        if expired.is_empty() {
            return;
        }
        let mut others = self.files.iter().filter(|(path, _)| !self.unsettled.contains_key(*path)).peekable();
        if others.peek().is_none() || others.any(|(_, it)| it.contents.is_some()) {
            expired.iter().for_each(|it| self.remove(it));
        }
    }

    fn remove(&mut self, path: &Arc<Path>) {
        if let Some(FileState { contents: Some(contents), .. }) = self.files.remove(path) {
            self.objects.replace(path, &contents, &mut ParsedManifest::default(), &mut self.changes);
        }
        self.unsettled.remove(path);
        self.reported.remove(path);
    }
}

impl FileState {
    fn consequence(&self) -> &'static str {
        match self.contents {
            Some(_) => "its last valid content stays active",
            None => "none of its objects are served",
        }
    }
}

impl FileReport {
    /// Adds what is remarkable in a file.
    fn add(&mut self, path: &Path, contents: &ParsedManifest) {
        self.problems.extend(contents.ignored.iter().map(|(at, kind)| {
            let reason = format!(
                "{kind} is ignored; supported are v1 Service, v1 Node, v1 Pod, discovery.k8s.io/v1 EndpointSlice, \
                 networking.k8s.io/v1 ServiceCIDR and lists of them",
            );
            problem(path, Some(*at), reason)
        }));
        let path = path.display();
        if contents.documents == 0 {
            let reason = "the file is empty; write a `kind: List` with `items: []` if that is intended";
            self.rejected.push(Rejected::not_served(path.to_string(), reason));
        }
        let of_file = |it: &Rejected| Rejected { item: format!("{path}: {}", it.item), ..it.clone() };
        self.rejected.extend(contents.rejected.iter().map(of_file));
    }
}

/// What is wrong with a file, or at a place in it.
fn problem(path: &Path, at: Option<Position>, reason: String) -> Rejected {
    let path = path.display();
    Rejected::served(at.map_or_else(|| path.to_string(), |at| format!("{path}: {at}")), reason)
}
