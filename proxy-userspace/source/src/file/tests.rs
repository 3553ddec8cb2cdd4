//! Files that change on a real file system.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    time::{Duration, Instant},
};

use model::ServiceName;
use tempfile::TempDir;
use tokio::time::timeout;

use super::{FileSource, read, store::GRACE};
use crate::{Snapshot, Snapshots};

/// How long anything may take that should happen at once; a loaded machine is slow.
const SOON: Duration = Duration::from_secs(10);

fn service(name: &str, port: u16) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  clusterIP: 10.96.0.1\n  ports:\n  - \
         {{port: {port}}}\n"
    )
}

fn names(snapshot: &Snapshot) -> String {
    let names: Vec<_> = snapshot.facts.services().keys().map(|it| it.name.to_string()).collect();
    names.join(" ")
}

fn port(snapshot: &Snapshot, name: &str) -> Option<u16> {
    let service = snapshot.facts.service(&ServiceName::new("default", name))?;
    Some(service.ports.first()?.port.get())
}

/// Waits until what is newest is as it should be.
#[track_caller]
fn wait_for(snapshots: &mut Snapshots, mut what: impl FnMut(&Snapshot) -> bool) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let found = snapshots.wait_for(|it| it.as_deref().is_some_and(&mut what));
        let outcome = timeout(SOON, found).await.map(drop);
        assert!(outcome.is_ok(), "{caller}: it stays {:?}", snapshots.borrow());
    }
}

/// What is refused of a snapshot, which is well otherwise.
#[track_caller]
fn refused(snapshot: &Snapshot) -> Vec<String> {
    assert_eq!(snapshot.problems, Vec::<String>::new());
    snapshot.rejected.iter().map(ToString::to_string).collect()
}

fn replace(path: &Path, text: &str) {
    let aside = path.with_extension("tmp");
    fs::write(&aside, text).unwrap();
    fs::rename(aside, path).unwrap();
}

#[test]
fn a_refusal_names_the_file() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("web.yaml");
    fs::write(
        &file,
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 70000}]}\n",
    )
    .unwrap();
    let rejected: Vec<_> = read(folder.path()).unwrap().rejected.iter().map(ToString::to_string).collect();
    let expect =
        "Service default/web: spec.ports[0].port: 70000 is not a port; write a number from 1 to 65535";
    assert_eq!(rejected, [format!("{}: {expect}", file.display())]);
}

#[tokio::test]
async fn an_edit_reaches_the_state_at_once() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("web.yaml");
    fs::write(&file, service("web", 80)).unwrap();
    let source = FileSource::start(&file).unwrap();
    let mut snapshots = source.snapshots();
    assert_eq!(port(snapshots.borrow().as_ref().unwrap(), "web"), Some(80));
    let mut best = Duration::MAX;
    for number in 81..91 {
        let begin = Instant::now();
        replace(&file, &service("web", number));
        wait_for(&mut snapshots, |it| port(it, "web") == Some(number)).await;
        best = best.min(begin.elapsed());
    }
    // The slow poll alone would take a second.
    assert!(best < Duration::from_millis(100), "{best:?}");
}

#[tokio::test]
async fn a_file_written_in_place_is_read() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("a.yaml"), service("a", 80)).unwrap();
    let source = FileSource::start(folder.path()).unwrap();
    let mut snapshots = source.snapshots();
    fs::write(folder.path().join("a.yaml"), service("a", 81)).unwrap();
    wait_for(&mut snapshots, |it| port(it, "a") == Some(81)).await;
    fs::write(folder.path().join("b.yml"), service("b", 80)).unwrap();
    wait_for(&mut snapshots, |it| names(it) == "a b").await;
}

#[tokio::test]
async fn a_broken_file_keeps_its_last_good_state_and_the_others_go_on() {
    let folder = TempDir::new().unwrap();
    let [a, b] = ["a.yaml", "b.yaml"].map(|it| folder.path().join(it));
    fs::write(&a, service("a", 80)).unwrap();
    fs::write(&b, service("b", 80)).unwrap();
    let source = FileSource::start(folder.path()).unwrap();
    let mut snapshots = source.snapshots();
    replace(&a, &format!("{}---\nkind: [\n", service("a", 81)));
    wait_for(&mut snapshots, |it| !it.problems.is_empty()).await;
    replace(&b, &service("b", 81));
    wait_for(&mut snapshots, |it| port(it, "b") == Some(81)).await;
    let snapshot = snapshots.borrow().clone().unwrap();
    assert_eq!(port(&snapshot, "a"), Some(80));
    let [problem] = snapshot.problems.as_slice() else { panic!("{:?}", snapshot.problems) };
    assert!(problem.contains("a.yaml: document 2, line "), "{problem}");
    assert!(problem.ends_with("what the file said before is kept"), "{problem}");
    replace(&a, &service("a", 82));
    wait_for(&mut snapshots, |it| port(it, "a") == Some(82) && it.problems.is_empty()).await;
}

#[tokio::test]
async fn a_broken_file_at_the_start_is_left_out_and_the_others_are_served() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("a.yaml"), "kind: [").unwrap();
    fs::write(folder.path().join("b.yaml"), service("b", 80)).unwrap();
    let source = FileSource::start(folder.path()).unwrap();
    let snapshot = source.snapshots().borrow().clone().unwrap();
    assert_eq!((names(&snapshot).as_str(), snapshot.problems.len()), ("b", 1));
}

#[tokio::test]
async fn nothing_is_published_while_no_file_has_ever_made_sense() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a.yaml");
    fs::write(&file, "kind: [").unwrap();
    let source = FileSource::start(&file).unwrap();
    let mut snapshots = source.snapshots();
    assert!(snapshots.borrow().is_none());
    assert_eq!(read(&file).unwrap().problems.len(), 1);
    replace(&file, &service("a", 80));
    wait_for(&mut snapshots, |it| names(it) == "a").await;
}

#[test]
fn a_path_that_is_missing_is_an_error_at_the_start() {
    let folder = TempDir::new().unwrap();
    let error = read(&folder.path().join("none.yaml")).unwrap_err();
    assert!(error.to_string().contains("none.yaml cannot be read"), "{error}");
    assert_eq!(error.error.kind(), std::io::ErrorKind::NotFound);
}

#[tokio::test]
async fn an_empty_folder_is_a_state_and_is_told_of() {
    let folder = TempDir::new().unwrap();
    let source = FileSource::start(folder.path()).unwrap();
    let mut snapshots = source.snapshots();
    assert_eq!(
        refused(snapshots.borrow().as_ref().unwrap()),
        [format!(
            "{}: there is no manifest in it; call them *.json, *.yaml or *.yml",
            folder.path().display()
        )]
    );
    replace(&folder.path().join("a.yaml"), "apiVersion: v1\nkind: List\nitems: []\n");
    wait_for(&mut snapshots, |it| *it == Snapshot::default()).await;
}

#[test]
fn a_file_with_nothing_in_it_is_told_of_and_the_others_are_served() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a.yaml");
    fs::write(folder.path().join("b.yaml"), service("b", 80)).unwrap();
    for nothing in ["", "\n\n", "# nothing yet\n---\n"] {
        fs::write(&file, nothing).unwrap();
        let snapshot = read(folder.path()).unwrap();
        assert_eq!((names(&snapshot).as_str(), refused(&snapshot).len()), ("b", 1), "{nothing:?}");
        let expect = format!("{}: there is nothing in it; ", file.display());
        assert!(refused(&snapshot)[0].starts_with(&expect), "{:?}", refused(&snapshot));
    }
}

#[tokio::test]
async fn a_deleted_file_takes_its_objects_away() {
    let folder = TempDir::new().unwrap();
    let [a, b] = ["a.yaml", "b.json"].map(|it| folder.path().join(it));
    fs::write(&a, service("a", 80)).unwrap();
    let json =
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"b"},"spec":{"clusterIP":"10.96.0.2"}}"#;
    fs::write(&b, json).unwrap();
    let source = FileSource::start(folder.path()).unwrap();
    let mut snapshots = source.snapshots();
    assert_eq!(names(snapshots.borrow().as_ref().unwrap()), "a b");
    fs::remove_file(&b).unwrap();
    wait_for(&mut snapshots, |it| names(it) == "a").await;
    fs::remove_file(&a).unwrap();
    wait_for(&mut snapshots, |it| names(it).is_empty()).await;
}

#[tokio::test]
async fn a_file_that_is_emptied_and_written_again_loses_nothing_in_between() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a.yaml");
    fs::write(&file, service("a", 80)).unwrap();
    let source = FileSource::start(&file).unwrap();
    let mut snapshots = source.snapshots();
    snapshots.mark_unchanged();
    for number in 81..84 {
        fs::write(&file, "").unwrap();
        tokio::time::sleep(GRACE / 20).await;
        fs::write(&file, service("a", number)).unwrap();
        timeout(SOON, snapshots.changed()).await.unwrap().unwrap();
        assert_eq!(port(snapshots.borrow_and_update().as_ref().unwrap(), "a"), Some(number));
    }
    // Left empty, it is complained about, and means what it meant.
    fs::write(&file, "").unwrap();
    wait_for(&mut snapshots, |it| it.problems.iter().any(|it| it.contains("a.yaml: empty"))).await;
    tokio::time::sleep(GRACE * 2).await;
    assert_eq!(names(snapshots.borrow().as_ref().unwrap()), "a");
}

#[tokio::test]
async fn a_source_that_is_gone_keeps_what_it_said() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a.yaml");
    fs::write(&file, service("a", 80)).unwrap();
    let source = FileSource::start(&file).unwrap();
    let mut snapshots = source.snapshots();
    fs::remove_file(&file).unwrap();
    wait_for(&mut snapshots, |it| !it.problems.is_empty()).await;
    tokio::time::sleep(GRACE * 2).await;
    assert_eq!(names(snapshots.borrow().as_ref().unwrap()), "a");
    fs::write(&file, service("b", 80)).unwrap();
    wait_for(&mut snapshots, |it| names(it) == "b").await;
}

#[tokio::test]
async fn a_file_that_is_deleted_and_written_again_loses_nothing_in_between() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a.yaml");
    fs::write(&file, service("a", 80)).unwrap();
    let source = FileSource::start(folder.path()).unwrap();
    let mut snapshots = source.snapshots();
    snapshots.mark_unchanged();
    fs::remove_file(&file).unwrap();
    tokio::time::sleep(GRACE / 20).await;
    fs::write(&file, service("a", 81)).unwrap();
    timeout(SOON, snapshots.changed()).await.unwrap().unwrap();
    assert_eq!(port(snapshots.borrow().as_ref().unwrap(), "a"), Some(81));
}

#[tokio::test]
async fn a_swapped_symbolic_link_is_seen() {
    // As a ConfigMap is mounted: the file leads through `..data`, which is swapped.
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
fn what_is_hidden_or_an_editors_own_is_not_read() {
    let folder = TempDir::new().unwrap();
    for name in [".a.yaml", "a.yaml~", "#a.yaml#", "a.yaml.swp", "a.txt", ".a.yaml.swp"] {
        fs::write(folder.path().join(name), service("a", 80)).unwrap();
    }
    fs::create_dir(folder.path().join("sub.yaml")).unwrap();
    fs::write(folder.path().join("sub.yaml/b.yaml"), service("b", 80)).unwrap();
    let snapshot = read(folder.path()).unwrap();
    assert!(refused(&snapshot)[0].contains("there is no manifest in it"), "{snapshot:?}");
    assert!(names(&snapshot).is_empty());
}

#[test]
fn of_an_object_in_two_files_the_last_counts() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("1.yaml"), service("a", 80)).unwrap();
    fs::write(folder.path().join("2.yaml"), service("a", 81)).unwrap();
    let snapshot = read(folder.path()).unwrap();
    assert_eq!(port(&snapshot, "a"), Some(81));
    let [problem] = snapshot.problems.as_slice() else { panic!("{:?}", snapshot.problems) };
    assert!(problem.contains("2.yaml: document 1, line 1: Service default/a is also in "), "{problem}");
}

#[test]
fn what_did_not_change_stays_the_same_object() {
    let folder = TempDir::new().unwrap();
    let before = {
        fs::write(folder.path().join("a.yaml"), service("a", 80)).unwrap();
        read(folder.path()).unwrap()
    };
    let mut store = super::Store::new(folder.path().to_owned());
    store.refresh(&std::collections::BTreeSet::new(), tokio::time::Instant::now());
    let after = store.snapshot(&before.facts).unwrap();
    let name = ServiceName::new("default", "a");
    let [before, after] =
        [&before, &after].map(|it| std::sync::Arc::as_ptr(it.facts.service(&name).unwrap()));
    assert_eq!(before, after);
}
