//! Changing files on a real file system.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use model::ServiceName;
use tempfile::TempDir;
use tokio::time::timeout;

use super::{FileSource, read, store::GRACE_PERIOD};
use crate::{Snapshot, Snapshots};

/// Time-out of what should happen at once, with room for a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(10);

fn service(name: &str, port: u16) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  clusterIP: 10.96.0.1\n  ports:\n  - \
         {{port: {port}}}\n"
    )
}

/// A source that follows a folder with these files.
fn follow(files: &[(&str, &str)]) -> (TempDir, FileSource, Snapshots) {
    let folder = TempDir::new().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let source = FileSource::start(folder.path()).unwrap();
    let snapshots = source.snapshots();
    (folder, source, snapshots)
}

/// The same for the single file `a.yaml`, with the Service `a`.
fn follow_file() -> (TempDir, PathBuf, FileSource, Snapshots) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a.yaml");
    fs::write(&file, service("a", 80)).unwrap();
    let source = FileSource::start(&file).unwrap();
    let snapshots = source.snapshots();
    (folder, file, source, snapshots)
}

fn newest(snapshots: &Snapshots) -> Arc<Snapshot> {
    snapshots.borrow().clone().unwrap()
}

fn names(snapshot: &Snapshot) -> String {
    let names: Vec<_> = snapshot.cluster.services().keys().map(|it| it.name.to_string()).collect();
    names.join(" ")
}

fn port(snapshot: &Snapshot, name: &str) -> Option<u16> {
    let service = snapshot.cluster.service(&ServiceName::new("default", name))?;
    Some(service.ports.first()?.port.get())
}

/// Waits until the newest snapshot fulfils a condition.
#[track_caller]
fn wait_for(
    snapshots: &mut Snapshots,
    mut condition: impl FnMut(&Snapshot) -> bool,
) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let found = snapshots.wait_for(|it| it.as_deref().is_some_and(&mut condition));
        let outcome = timeout(TIMEOUT, found).await.map(drop);
        assert!(outcome.is_ok(), "{caller}: the snapshot is still {:?}", snapshots.borrow());
    }
}

/// The rejected items of a snapshot, which has no problems otherwise.
#[track_caller]
fn rejected(snapshot: &Snapshot) -> Vec<String> {
    assert_eq!(snapshot.problems, Vec::<String>::new());
    snapshot.rejected.iter().map(ToString::to_string).collect()
}

fn replace(path: &Path, text: &str) {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, text).unwrap();
    fs::rename(temporary, path).unwrap();
}

#[test]
fn a_rejected_item_names_the_file() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("web.yaml");
    fs::write(
        &file,
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 70000}]}\n",
    )
    .unwrap();
    let rejected: Vec<_> = read(folder.path()).unwrap().rejected.iter().map(ToString::to_string).collect();
    let expect = "Service default/web: spec.ports[0].port: 70000 is not a port; use a number from 1 to 65535";
    assert_eq!(rejected, [format!("{}: {expect}", file.display())]);
}

#[tokio::test]
async fn an_edit_takes_effect_at_once() {
    let (_folder, file, _source, mut snapshots) = follow_file();
    assert_eq!(port(&newest(&snapshots), "a"), Some(80));
    let mut best = Duration::MAX;
    for number in 81..91 {
        let begin = Instant::now();
        replace(&file, &service("a", number));
        wait_for(&mut snapshots, |it| port(it, "a") == Some(number)).await;
        best = best.min(begin.elapsed());
    }
    // Polling alone would take a second.
    assert!(best < Duration::from_millis(100), "{best:?}");
}

#[tokio::test]
async fn a_file_written_in_place_is_read() {
    let (folder, _source, mut snapshots) = follow(&[("a.yaml", &service("a", 80))]);
    fs::write(folder.path().join("a.yaml"), service("a", 81)).unwrap();
    wait_for(&mut snapshots, |it| port(it, "a") == Some(81)).await;
    fs::write(folder.path().join("b.yml"), service("b", 80)).unwrap();
    wait_for(&mut snapshots, |it| names(it) == "a b").await;
}

#[tokio::test]
async fn an_invalid_file_keeps_its_last_valid_content_and_others_are_updated() {
    let files = [("a.yaml", &*service("a", 80)), ("b.yaml", &service("b", 80))];
    let (folder, _source, mut snapshots) = follow(&files);
    let [a, b] = ["a.yaml", "b.yaml"].map(|it| folder.path().join(it));
    replace(&a, &format!("{}---\nkind: [\n", service("a", 81)));
    wait_for(&mut snapshots, |it| !it.problems.is_empty()).await;
    replace(&b, &service("b", 81));
    wait_for(&mut snapshots, |it| port(it, "b") == Some(81)).await;
    let snapshot = newest(&snapshots);
    assert_eq!(port(&snapshot, "a"), Some(80));
    let [problem] = snapshot.problems.as_slice() else { panic!("{:?}", snapshot.problems) };
    assert!(problem.contains("a.yaml: document 2, line "), "{problem}");
    assert!(problem.ends_with("its last valid content stays active"), "{problem}");
    replace(&a, &service("a", 82));
    wait_for(&mut snapshots, |it| port(it, "a") == Some(82) && it.problems.is_empty()).await;
}

#[tokio::test]
async fn a_file_that_is_invalid_at_the_start_is_skipped_and_others_are_served() {
    let (_folder, _source, snapshots) = follow(&[("a.yaml", "kind: ["), ("b.yaml", &service("b", 80))]);
    let snapshot = newest(&snapshots);
    assert_eq!((names(&snapshot).as_str(), snapshot.problems.len()), ("b", 1));
}

#[tokio::test]
async fn nothing_is_published_before_a_file_is_valid() {
    let (folder, _source, mut snapshots) = follow(&[("a.yaml", "kind: [")]);
    let file = folder.path().join("a.yaml");
    assert!(snapshots.borrow().is_none());
    assert_eq!(read(&file).unwrap().problems.len(), 1);
    replace(&file, &service("a", 80));
    wait_for(&mut snapshots, |it| names(it) == "a").await;
}

#[test]
fn a_missing_path_is_an_error_at_the_start() {
    let folder = TempDir::new().unwrap();
    let error = read(&folder.path().join("none.yaml")).unwrap_err();
    assert!(
        error.to_string().starts_with("cannot read ") && error.to_string().contains("none.yaml"),
        "{error}"
    );
    assert_eq!(error.error.kind(), std::io::ErrorKind::NotFound);
}

#[tokio::test]
async fn an_empty_folder_is_an_empty_state_and_is_reported() {
    let (folder, _source, mut snapshots) = follow(&[]);
    assert_eq!(
        rejected(&newest(&snapshots)),
        [format!(
            "{}: the folder has no manifests; expected are *.json, *.yaml or *.yml",
            folder.path().display()
        )]
    );
    replace(&folder.path().join("a.yaml"), "apiVersion: v1\nkind: List\nitems: []\n");
    wait_for(&mut snapshots, |it| *it == Snapshot::default()).await;
}

#[test]
fn an_empty_file_is_reported_and_others_are_served() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a.yaml");
    fs::write(folder.path().join("b.yaml"), service("b", 80)).unwrap();
    for empty in ["", "\n\n", "# nothing yet\n---\n"] {
        fs::write(&file, empty).unwrap();
        let snapshot = read(folder.path()).unwrap();
        assert_eq!((names(&snapshot).as_str(), rejected(&snapshot).len()), ("b", 1), "{empty:?}");
        let expect = format!("{}: the file is empty; ", file.display());
        assert!(rejected(&snapshot)[0].starts_with(&expect), "{:?}", rejected(&snapshot));
    }
}

#[tokio::test]
async fn deleting_a_file_removes_its_objects() {
    let json =
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"b"},"spec":{"clusterIP":"10.96.0.2"}}"#;
    let (folder, _source, mut snapshots) = follow(&[("a.yaml", &service("a", 80)), ("b.json", json)]);
    assert_eq!(names(&newest(&snapshots)), "a b");
    fs::remove_file(folder.path().join("b.json")).unwrap();
    wait_for(&mut snapshots, |it| names(it) == "a").await;
    fs::remove_file(folder.path().join("a.yaml")).unwrap();
    wait_for(&mut snapshots, |it| names(it).is_empty()).await;
}

#[tokio::test]
async fn a_file_that_is_truncated_and_written_again_keeps_its_objects() {
    let (_folder, file, _source, mut snapshots) = follow_file();
    snapshots.mark_unchanged();
    for number in 81..84 {
        fs::write(&file, "").unwrap();
        tokio::time::sleep(GRACE_PERIOD / 20).await;
        fs::write(&file, service("a", number)).unwrap();
        timeout(TIMEOUT, snapshots.changed()).await.unwrap().unwrap();
        assert_eq!(port(snapshots.borrow_and_update().as_ref().unwrap(), "a"), Some(number));
    }
    // If it stays empty, that is reported, and the last valid content stays active.
    fs::write(&file, "").unwrap();
    wait_for(&mut snapshots, |it| it.problems.iter().any(|it| it.contains("a.yaml: empty"))).await;
    tokio::time::sleep(GRACE_PERIOD * 2).await;
    assert_eq!(names(&newest(&snapshots)), "a");
}

#[tokio::test]
async fn a_deleted_source_keeps_its_last_content() {
    let (_folder, file, _source, mut snapshots) = follow_file();
    fs::remove_file(&file).unwrap();
    wait_for(&mut snapshots, |it| !it.problems.is_empty()).await;
    tokio::time::sleep(GRACE_PERIOD * 2).await;
    assert_eq!(names(&newest(&snapshots)), "a");
    fs::write(&file, service("b", 80)).unwrap();
    wait_for(&mut snapshots, |it| names(it) == "b").await;
}

#[tokio::test]
async fn a_file_that_is_deleted_and_written_again_keeps_its_objects() {
    let (folder, _source, mut snapshots) = follow(&[("a.yaml", &service("a", 80))]);
    let file = folder.path().join("a.yaml");
    snapshots.mark_unchanged();
    fs::remove_file(&file).unwrap();
    tokio::time::sleep(GRACE_PERIOD / 20).await;
    fs::write(&file, service("a", 81)).unwrap();
    timeout(TIMEOUT, snapshots.changed()).await.unwrap().unwrap();
    assert_eq!(port(&newest(&snapshots), "a"), Some(81));
}

#[tokio::test]
async fn a_replaced_symbolic_link_is_noticed() {
    // As in a mounted ConfigMap: the file is a link through `..data`, which is replaced.
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    for (version, number) in [("..1", 80), ("..2", 81)] {
        fs::create_dir(path(version)).unwrap();
        fs::write(path(version).join("a.yaml"), service("a", number)).unwrap();
    }
    symlink("..1", path("..data")).unwrap();
    symlink("..data/a.yaml", path("a.yaml")).unwrap();
    let source = FileSource::start(folder.path()).unwrap();
    let mut snapshots = source.snapshots();
    symlink("..2", path("..new")).unwrap();
    fs::rename(path("..new"), path("..data")).unwrap();
    wait_for(&mut snapshots, |it| port(it, "a") == Some(81)).await;
}

#[tokio::test]
async fn a_folder_that_is_replaced_is_followed() {
    let outer = TempDir::new().unwrap();
    let folder = outer.path().join("manifests");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("a.yaml"), service("a", 80)).unwrap();
    let source = FileSource::start(&folder).unwrap();
    let mut snapshots = source.snapshots();
    fs::rename(&folder, outer.path().join("old")).unwrap();
    wait_for(&mut snapshots, |it| names(it) == "a" && it.problems.len() == 1).await;
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("a.yaml"), service("b", 80)).unwrap();
    wait_for(&mut snapshots, |it| names(it) == "b" && it.problems.is_empty()).await;
    replace(&folder.join("a.yaml"), &service("c", 80));
    wait_for(&mut snapshots, |it| names(it) == "c").await;
}

#[test]
fn hidden_and_temporary_files_are_not_read() {
    let folder = TempDir::new().unwrap();
    for name in [".a.yaml", "a.yaml~", "#a.yaml#", "a.yaml.swp", "a.txt", ".a.yaml.swp"] {
        fs::write(folder.path().join(name), service("a", 80)).unwrap();
    }
    fs::create_dir(folder.path().join("sub.yaml")).unwrap();
    fs::write(folder.path().join("sub.yaml/b.yaml"), service("b", 80)).unwrap();
    let snapshot = read(folder.path()).unwrap();
    assert!(rejected(&snapshot)[0].contains("the folder has no manifests"), "{snapshot:?}");
    assert!(names(&snapshot).is_empty());
}

#[test]
fn the_last_of_two_definitions_of_an_object_wins() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("1.yaml"), service("a", 80)).unwrap();
    fs::write(folder.path().join("2.yaml"), service("a", 81)).unwrap();
    let snapshot = read(folder.path()).unwrap();
    assert_eq!(port(&snapshot, "a"), Some(81));
    let [problem] = snapshot.problems.as_slice() else { panic!("{:?}", snapshot.problems) };
    assert!(
        problem.contains("2.yaml: document 1, line 1: Service default/a is also defined in "),
        "{problem}"
    );
}

#[test]
fn an_unchanged_object_stays_the_same_object_in_memory() {
    let folder = TempDir::new().unwrap();
    let before = {
        fs::write(folder.path().join("a.yaml"), service("a", 80)).unwrap();
        read(folder.path()).unwrap()
    };
    let mut store = super::FileStore::new(folder.path().to_owned());
    store.refresh(&std::collections::BTreeSet::new(), tokio::time::Instant::now());
    let after = store.snapshot(&before.cluster).unwrap();
    let name = ServiceName::new("default", "a");
    let [before, after] = [&before, &after].map(|it| Arc::as_ptr(it.cluster.service(&name).unwrap()));
    assert_eq!(before, after);
}
