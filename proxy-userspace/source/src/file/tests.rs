//! Changing files on a real file system.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Write as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use model::{
    Rejected, RequestedMetadata, ServiceName,
    cluster::{ClusterState, ObjectName},
};
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use super::{FileReport, FileSource, FileUpdate, read, store::GRACE_PERIOD};

/// Timeout of what should happen at once, with room for a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(120);

fn service(name: &str, port: u16) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  clusterIP: 10.96.0.1\n  ports:\n  - \
         {{port: {port}}}\n"
    )
}

/// What the updates so far add up to.
#[derive(Debug, Default, PartialEq)]
struct Snapshot {
    cluster: ClusterState,
    report: FileReport,
}

impl Snapshot {
    fn apply(&mut self, FileUpdate { changes, report }: FileUpdate) {
        assert!(changes.keys().all(|it| matches!(it, ObjectName::Service(_))));
        self.cluster.apply(changes);
        if let Some(report) = report {
            self.report = report;
        }
    }

    fn of(path: &Path) -> Self {
        let mut snapshot = Self::default();
        snapshot.apply(read(path, RequestedMetadata::default()).unwrap());
        snapshot
    }

    fn names(&self) -> String {
        let names: Vec<_> = self.cluster.services.keys().map(|it| it.name.to_string()).collect();
        names.join(" ")
    }

    fn port(&self, name: &str) -> Option<u16> {
        let service = self.cluster.services.get(&ServiceName::new("default", name))?;
        Some(service.ports.first()?.port.get())
    }

    /// The rejected items; there are no other problems.
    #[track_caller]
    fn rejected(&self) -> Vec<String> {
        assert_eq!(self.report.problems, []);
        self.report.rejected.iter().map(Rejected::to_string).collect()
    }

    /// The only problem.
    #[track_caller]
    fn problem(&self) -> String {
        let [problem] = self.report.problems.as_slice() else { panic!("{:?}", self.report.problems) };
        problem.to_string()
    }
}

struct TestSource {
    source: FileSource,
    snapshot: Snapshot,
}

impl TestSource {
    async fn new(path: &Path) -> Self {
        Self::with_metadata(path, RequestedMetadata::default()).await
    }

    async fn with_metadata(path: &Path, requested: RequestedMetadata) -> Self {
        let source = FileSource::start(path, requested).unwrap();
        let mut follower = Self { source, snapshot: Snapshot::default() };
        follower.now().await;
        follower
    }

    /// What is known now, without waiting.
    async fn now(&mut self) -> &Snapshot {
        while let Some(update) = self.update(Duration::ZERO).await {
            self.snapshot.apply(update);
        }
        &self.snapshot
    }

    async fn update(&self, limit: Duration) -> Option<FileUpdate> {
        timeout(limit, self.source.next()).await.ok().map(Option::unwrap)
    }

    #[track_caller]
    fn next(&mut self) -> impl Future<Output = &Snapshot> {
        let caller = std::panic::Location::caller();
        async move {
            let update = self.update(TIMEOUT).await;
            self.snapshot
                .apply(update.unwrap_or_else(|| panic!("{caller}: no update after {:?}", self.snapshot)));
            &self.snapshot
        }
    }

    #[track_caller]
    fn wait_for(&mut self, mut condition: impl FnMut(&Snapshot) -> bool) -> impl Future<Output = &Snapshot> {
        let caller = std::panic::Location::caller();
        async move {
            while !condition(&self.snapshot) {
                let Some(update) = self.update(TIMEOUT).await else {
                    panic!("{caller}: it is still {:?}", self.snapshot)
                };
                self.snapshot.apply(update);
            }
            &self.snapshot
        }
    }

    /// Observes for a time that something does not change.
    #[track_caller]
    fn keeps(&mut self, mut condition: impl FnMut(&Snapshot) -> bool) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        async move {
            let end = Instant::now() + GRACE_PERIOD * 2;
            loop {
                assert!(condition(&self.snapshot), "{caller}: {:?}", self.snapshot);
                let Some(update) = self.update(end.saturating_duration_since(Instant::now())).await else {
                    break;
                };
                self.snapshot.apply(update);
            }
        }
    }
}

fn folder_with(files: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

/// A source that follows a folder with these files.
async fn follow(files: &[(&str, &str)]) -> (TempDir, TestSource) {
    let folder = folder_with(files);
    let follower = TestSource::new(folder.path()).await;
    (folder, follower)
}

/// The same for the single file `a.yaml`, with the Service `a`.
async fn follow_file() -> (TempDir, PathBuf, TestSource) {
    let folder = folder_with(&[("a.yaml", &service("a", 80))]);
    let file = folder.path().join("a.yaml");
    let follower = TestSource::new(&file).await;
    (folder, file, follower)
}

fn replace(path: &Path, text: &str) {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, text).unwrap();
    fs::rename(temporary, path).unwrap();
}

#[test]
fn a_rejected_item_names_the_file() {
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 70000}]}\n";
    let folder = folder_with(&[("web.yaml", text)]);
    let expect = "Service default/web: spec.ports[0].port: 70000 is not a port; use a number from 1 to 65535";
    let file = folder.path().join("web.yaml");
    assert_eq!(Snapshot::of(folder.path()).rejected(), [format!("{}: {expect}", file.display())]);
}

#[tokio::test]
async fn an_edit_takes_effect_at_once() {
    let (_folder, file, mut follower) = follow_file().await;
    assert_eq!(follower.now().await.port("a"), Some(80));
    let mut best = Duration::MAX;
    for number in 81..91 {
        let begin = Instant::now();
        replace(&file, &service("a", number));
        follower.wait_for(|it| it.port("a") == Some(number)).await;
        best = best.min(begin.elapsed());
    }
    // Polling alone would take a second.
    assert!(best < Duration::from_millis(100), "{best:?}");
}

#[tokio::test]
async fn an_edit_hands_over_what_it_changes_and_nothing_else() {
    let names: Vec<_> = (0..50).map(|it| format!("s{it}")).collect();
    let all = |port| {
        names.iter().map(|it| service(it, if it == "s7" { port } else { 80 }) + "---\n").collect::<String>()
    };
    let (folder, follower) = follow(&[("all.yaml", &all(80)), ("other.yaml", &service("other", 80))]).await;
    assert_eq!(follower.update(GRACE_PERIOD * 2).await.map(|it| it.changes.len()), None);
    // Neither a comment nor the order of files or documents is a change.
    replace(&folder.path().join("all.yaml"), &format!("# a comment\n{}", all(81)));
    let FileUpdate { changes, report } = follower.update(TIMEOUT).await.unwrap();
    let changed: Vec<_> = changes.keys().map(ToString::to_string).collect();
    assert_eq!((changed, report), (vec!["Service default/s7".to_owned()], None));
}

#[tokio::test]
async fn a_file_written_in_place_is_read() {
    let (folder, mut follower) = follow(&[("a.yaml", &service("a", 80))]).await;
    fs::write(folder.path().join("a.yaml"), service("a", 81)).unwrap();
    follower.wait_for(|it| it.port("a") == Some(81)).await;
    fs::write(folder.path().join("b.yml"), service("b", 80)).unwrap();
    follower.wait_for(|it| it.names() == "a b").await;
}

#[tokio::test]
async fn a_file_that_is_being_written_keeps_its_last_valid_content() {
    let (folder, mut follower) =
        follow(&[("a.yaml", &service("a", 80)), ("b.yaml", &service("b", 80))]).await;
    let text = service("a", 81);
    let (first, rest) = text.split_at(text.len() - 4);
    let mut file = File::create(folder.path().join("a.yaml")).unwrap();
    file.write_all(first.as_bytes()).unwrap();
    follower.keeps(|it| it.port("a") == Some(80) && it.port("b") == Some(80)).await;
    file.write_all(rest.as_bytes()).unwrap();
    drop(file);
    follower.wait_for(|it| it.port("a") == Some(81) && it.report == FileReport::default()).await;
}

#[tokio::test]
async fn an_invalid_file_keeps_its_last_valid_content_and_others_are_updated() {
    let files = [("a.yaml", &*service("a", 80)), ("b.yaml", &service("b", 80))];
    let (folder, mut follower) = follow(&files).await;
    let [a, b] = ["a.yaml", "b.yaml"].map(|it| folder.path().join(it));
    replace(&a, &format!("{}---\nkind: [\n", service("a", 81)));
    follower.wait_for(|it| !it.report.problems.is_empty()).await;
    replace(&b, &service("b", 81));
    let snapshot = follower.wait_for(|it| it.port("b") == Some(81)).await;
    assert_eq!(snapshot.port("a"), Some(80));
    let problem = snapshot.problem();
    assert!(problem.contains("a.yaml: document 2, line "), "{problem}");
    assert!(problem.ends_with("its last valid content stays active"), "{problem}");
    replace(&a, &service("a", 82));
    follower.wait_for(|it| it.port("a") == Some(82) && it.report.problems.is_empty()).await;
}

#[tokio::test]
async fn a_file_that_is_invalid_at_the_start_is_skipped_and_others_are_served() {
    let (_folder, mut follower) = follow(&[("a.yaml", "kind: ["), ("b.yaml", &service("b", 80))]).await;
    let snapshot = follower.now().await;
    assert_eq!((snapshot.names().as_str(), snapshot.report.problems.len()), ("b", 1));
}

#[tokio::test]
async fn nothing_is_published_before_a_file_is_valid() {
    let (folder, mut follower) = follow(&[("a.yaml", "kind: [")]).await;
    let file = folder.path().join("a.yaml");
    assert_eq!(*follower.now().await, Snapshot::default());
    assert_eq!(Snapshot::of(&file).report.problems.len(), 1);
    replace(&file, &service("a", 80));
    follower.wait_for(|it| it.names() == "a").await;
}

#[tokio::test]
async fn if_only_an_invalid_file_is_left_the_others_keep_their_objects() {
    let (folder, mut follower) = follow(&[("a.yaml", &service("a", 80))]).await;
    fs::write(folder.path().join("b.yaml"), "kind: [").unwrap();
    fs::remove_file(folder.path().join("a.yaml")).unwrap();
    follower.keeps(|it| it.names() == "a").await;
    replace(&folder.path().join("b.yaml"), &service("b", 80));
    follower.wait_for(|it| it.names() == "b").await;
}

#[test]
fn a_missing_path_is_an_error_at_the_start() {
    let folder = TempDir::new().unwrap();
    let error = read(&folder.path().join("none.yaml"), RequestedMetadata::default()).unwrap_err();
    assert!(
        error.to_string().starts_with("cannot read ") && error.to_string().contains("none.yaml"),
        "{error}"
    );
    assert_eq!(error.error.kind(), std::io::ErrorKind::NotFound);
}

#[tokio::test]
async fn an_empty_folder_is_an_empty_state_and_is_reported() {
    let (folder, mut follower) = follow(&[]).await;
    let path = folder.path().display();
    let expect = format!("{path}: the folder has no manifests; expected are *.json, *.yaml or *.yml");
    assert_eq!(follower.now().await.rejected(), [expect]);
    replace(&folder.path().join("a.yaml"), "apiVersion: v1\nkind: List\nitems: []\n");
    follower.wait_for(|it| *it == Snapshot::default()).await;
}

#[test]
fn an_empty_file_is_reported_and_others_are_served() {
    let folder = folder_with(&[("b.yaml", &service("b", 80))]);
    let file = folder.path().join("a.yaml");
    for empty in ["", "\n\n", "# nothing yet\n---\n"] {
        fs::write(&file, empty).unwrap();
        let snapshot = Snapshot::of(folder.path());
        assert_eq!((snapshot.names().as_str(), snapshot.rejected().len()), ("b", 1), "{empty:?}");
        let expect = format!("{}: the file is empty; ", file.display());
        assert!(snapshot.rejected()[0].starts_with(&expect), "{:?}", snapshot.rejected());
    }
}

#[tokio::test]
async fn deleting_a_file_removes_its_objects() {
    let json =
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"b"},"spec":{"clusterIP":"10.96.0.2"}}"#;
    let (folder, mut follower) = follow(&[("a.yaml", &service("a", 80)), ("b.json", json)]).await;
    assert_eq!(follower.now().await.names(), "a b");
    fs::remove_file(folder.path().join("b.json")).unwrap();
    follower.wait_for(|it| it.names() == "a").await;
    fs::remove_file(folder.path().join("a.yaml")).unwrap();
    follower.wait_for(|it| it.names().is_empty()).await;
}

#[tokio::test]
async fn a_file_that_is_truncated_or_deleted_and_written_again_keeps_its_objects() {
    for is_folder in [false, true] {
        let folder = folder_with(&[("a.yaml", &service("a", 80))]);
        let file = folder.path().join("a.yaml");
        let source: &Path = if is_folder { folder.path() } else { &file };
        let mut follower = TestSource::new(source).await;
        for number in 81..85 {
            // That the source itself is deleted is reported at once.
            let is_deleted = is_folder && number % 2 == 0;
            if is_deleted { fs::remove_file(&file) } else { fs::write(&file, "") }.unwrap();
            sleep(GRACE_PERIOD / 20).await;
            fs::write(&file, service("a", number)).unwrap();
            assert_eq!(follower.next().await.port("a"), Some(number));
        }
        // If it stays empty, that is reported, and the last valid content stays active.
        fs::write(&file, "").unwrap();
        follower
            .wait_for(|it| it.report.problems.iter().any(|it| it.to_string().contains("a.yaml: empty")))
            .await;
        follower.keeps(|it| it.names() == "a").await;
    }
}

#[tokio::test]
async fn a_deleted_source_keeps_its_last_content() {
    let (_folder, file, mut follower) = follow_file().await;
    fs::remove_file(&file).unwrap();
    follower.wait_for(|it| !it.report.problems.is_empty()).await;
    follower.keeps(|it| it.names() == "a").await;
    fs::write(&file, service("b", 80)).unwrap();
    follower.wait_for(|it| it.names() == "b").await;
}

#[tokio::test]
async fn a_renamed_file_keeps_its_objects_and_is_no_second_definition() {
    let (folder, mut follower) =
        follow(&[("b.yaml", &service("a", 80)), ("c.yaml", &service("c", 80))]).await;
    let path = |name: &str| folder.path().join(name);
    let is_same = |it: &Snapshot| it.names() == "a c" && it.report == FileReport::default();
    for (from, to) in [("b.yaml", "d.yaml"), ("d.yaml", "a.yaml")] {
        fs::rename(path(from), path(to)).unwrap();
        follower.keeps(is_same).await;
    }
    replace(&path("a.yaml"), &service("a", 81));
    follower.wait_for(|it| it.port("a") == Some(81)).await;
}

#[tokio::test]
async fn an_object_that_moves_to_another_file_never_vanishes() {
    let both = format!("{}---\n{}", service("a", 80), service("b", 80));
    let (folder, mut follower) = follow(&[("1.yaml", &both), ("2.yaml", &service("c", 80))]).await;
    let [first, second] = ["1.yaml", "2.yaml"].map(|it| folder.path().join(it));
    replace(&second, &format!("{}---\n{}", service("c", 80), service("b", 80)));
    let problem = "Service default/b is also defined in";
    let is_reported = |it: &Snapshot| it.report.problems.iter().any(|it| it.to_string().contains(problem));
    assert_eq!(follower.wait_for(is_reported).await.names(), "a b c");
    replace(&first, &service("a", 80));
    assert_eq!(follower.wait_for(|it| !is_reported(it)).await.names(), "a b c");
    replace(&second, &service("c", 80));
    follower.wait_for(|it| it.names() == "a c").await;
}

#[tokio::test]
async fn a_mounted_config_map_is_followed_through_its_links() {
    // A file is a link through `..data`, which the kubelet replaces; it adds and removes files after that.
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    for (version, files) in [("..1", [("a", 80), ("b", 80)]), ("..2", [("a", 81), ("c", 80)])] {
        fs::create_dir(path(version)).unwrap();
        for (name, port) in files {
            fs::write(path(version).join(name).with_extension("yaml"), service(name, port)).unwrap();
        }
    }
    let publish = |version: &str| {
        symlink(version, path("..data_tmp")).unwrap();
        fs::rename(path("..data_tmp"), path("..data")).unwrap();
    };
    publish("..1");
    for name in ["a.yaml", "b.yaml"] {
        symlink(Path::new("..data").join(name), path(name)).unwrap();
    }
    let mut follower = TestSource::new(folder.path()).await;
    let mut file = TestSource::new(&path("a.yaml")).await;
    assert_eq!(follower.now().await.names(), "a b");
    publish("..2");
    symlink("..data/c.yaml", path("c.yaml")).unwrap();
    fs::remove_file(path("b.yaml")).unwrap();
    fs::remove_dir_all(path("..1")).unwrap();
    follower.wait_for(|it| it.names() == "a c" && it.port("a") == Some(81)).await;
    file.wait_for(|it| it.port("a") == Some(81)).await;
}

#[tokio::test]
async fn a_link_to_a_file_elsewhere_is_followed_without_notifications() {
    let elsewhere = TempDir::new().unwrap();
    let target = elsewhere.path().join("target");
    fs::write(&target, service("a", 80)).unwrap();
    let (folder, mut follower) = follow(&[("b.yaml", &service("b", 80))]).await;
    symlink(&target, folder.path().join("a.yaml")).unwrap();
    follower.wait_for(|it| it.names() == "a b").await;
    fs::write(&target, service("a", 81)).unwrap();
    follower.wait_for(|it| it.port("a") == Some(81)).await;
}

#[tokio::test]
async fn a_folder_that_is_replaced_is_followed() {
    let outer = TempDir::new().unwrap();
    let folder = outer.path().join("manifests");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("a.yaml"), service("a", 80)).unwrap();
    let mut follower = TestSource::new(&folder).await;
    fs::rename(&folder, outer.path().join("old")).unwrap();
    follower.wait_for(|it| it.names() == "a" && it.report.problems.len() == 1).await;
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("a.yaml"), service("b", 80)).unwrap();
    follower.wait_for(|it| it.names() == "b" && it.report.problems.is_empty()).await;
    replace(&folder.join("a.yaml"), &service("c", 80));
    follower.wait_for(|it| it.names() == "c").await;
}

#[tokio::test]
async fn a_deleted_folder_keeps_its_objects_until_it_exists_again() {
    let outer = TempDir::new().unwrap();
    let folder = outer.path().join("manifests");
    let fill = |port| {
        fs::create_dir(&folder).unwrap();
        for name in ["a", "b", "c"] {
            fs::write(folder.join(name).with_extension("yaml"), service(name, port)).unwrap();
        }
    };
    fill(80);
    let mut follower = TestSource::new(&folder).await;
    for port in 81..84 {
        fs::remove_dir_all(&folder).unwrap();
        follower.wait_for(|it| !it.report.problems.is_empty()).await;
        follower.keeps(|it| it.names() == "a b c").await;
        fill(port);
        let ports = |it: &Snapshot| ["a", "b", "c"].map(|name| it.port(name));
        follower.wait_for(|it| ports(it) == [Some(port); 3] && it.report == FileReport::default()).await;
    }
    // Deleted and created again at once.
    fs::remove_dir_all(&folder).unwrap();
    fill(90);
    follower
        .wait_for(|it| {
            assert_eq!(it.names(), "a b c");
            it.port("c") == Some(90)
        })
        .await;
    replace(&folder.join("a.yaml"), &service("a", 91));
    follower.wait_for(|it| it.port("a") == Some(91)).await;
}

#[test]
fn hidden_and_temporary_files_are_not_read() {
    let text = service("a", 80);
    let names = [".a.yaml", "a.yaml~", "#a.yaml#", "a.yaml.swp", "a.txt", ".a.yaml.swp"];
    let folder = folder_with(&names.map(|it| (it, &*text)));
    fs::create_dir(folder.path().join("sub.yaml")).unwrap();
    fs::write(folder.path().join("sub.yaml/b.yaml"), service("b", 80)).unwrap();
    let snapshot = Snapshot::of(folder.path());
    assert!(snapshot.rejected()[0].contains("the folder has no manifests"), "{snapshot:?}");
    assert!(snapshot.names().is_empty());
}

#[tokio::test]
async fn the_last_of_two_definitions_of_an_object_counts_until_it_is_removed() {
    let twice = format!("{}---\n{}", service("a", 80), service("a", 81));
    let (folder, mut follower) = follow(&[("1.yaml", &twice), ("2.yaml", &service("a", 82))]).await;
    let snapshot = follower.now().await;
    assert_eq!(snapshot.port("a"), Some(82));
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (first, second) = (path("1.yaml"), path("2.yaml"));
    let expect = [
        format!(
            "{first}: document 2, line 9: Service default/a is also defined in {first}, document 1, line 1; "
        ),
        format!(
            "{second}: document 1, line 1: Service default/a is also defined in {first}, document 2, line 9; "
        ),
    ];
    let problems = snapshot.report.problems.iter().zip(expect);
    assert_eq!(snapshot.report.problems.len(), 2);
    problems.for_each(|(it, expect)| assert!(it.to_string().starts_with(&expect), "{it}"));
    fs::remove_file(second).unwrap();
    follower.wait_for(|it| it.port("a") == Some(81) && it.report.problems.len() == 1).await;
    replace(Path::new(&first), &service("a", 80));
    follower.wait_for(|it| it.port("a") == Some(80) && it.report == FileReport::default()).await;
}

#[tokio::test]
async fn any_order_of_file_changes_leads_to_the_state_of_the_folder() {
    let folder = TempDir::new().unwrap();
    let mut follower = TestSource::new(folder.path()).await;
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..40 {
        for _ in 0..random.usize(1..5) {
            let path =
                |random: &mut fastrand::Rng| folder.path().join(format!("{}.yaml", random.usize(0..4)));
            let (from, to) = (path(&mut random), path(&mut random));
            let services = (0..random.usize(0..4))
                .map(|_| service(["a", "b", "c"][random.usize(0..3)], random.u16(80..83)));
            let text = services.collect::<Vec<_>>().join("---\n");
            let text = if text.is_empty() { "apiVersion: v1\nkind: List\nitems: []\n" } else { &text };
            match random.u8(0..5) {
                0 => drop(fs::remove_file(from)),
                1 => drop(fs::rename(from, to)),
                2 => fs::write(to, text).unwrap(),
                _ => replace(&to, text),
            }
        }
        sleep(Duration::from_millis(random.u64(0..30))).await;
    }
    replace(&folder.path().join("last.yaml"), &service("last", 80));
    let expect = Snapshot::of(folder.path());
    follower.wait_for(|it| it.cluster == expect.cluster).await;
    let problems = |it: &Snapshot| it.report.problems.iter().cloned().collect::<BTreeSet<_>>();
    follower.wait_for(|it| problems(it) == problems(&expect)).await;
}

#[tokio::test]
async fn requested_labels_are_followed_and_others_are_no_change() {
    const OBJECT: &str = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "labels":
        {"app": "one", "tier": 7}, "annotations": {"note": "text"}}, "spec": {"clusterIP": "10.96.0.1", "ports": []}}"#;
    let forms = [
        OBJECT.to_owned(),
        format!(r#"{{"apiVersion": "v1", "kind": "List", "items": [{OBJECT}]}}"#),
        format!("apiVersion: v1\nkind: List\nitems:\n- {}\n", OBJECT.replace('\n', " ")),
        format!("# YAML\n--- {OBJECT}\n"),
    ];
    for text in forms {
        let folder = folder_with(&[("a.yaml", &text)]);
        let path = folder.path().join("a.yaml");
        let requested = RequestedMetadata::new(vec!["app".parse().unwrap()], Vec::new());
        let mut test = TestSource::with_metadata(folder.path(), requested).await;
        let label = |it: &Snapshot| {
            let service = it.cluster.services.get(&ServiceName::new("default", "a"))?;
            let metadata = service.metadata.as_deref().expect("a label is requested");
            assert_eq!((metadata.labels.len(), metadata.annotations.len()), (1, 0));
            metadata.labels.get("app").cloned()
        };
        assert_eq!(label(&test.snapshot).as_deref(), Some("one"), "{text}");
        // The label changes after the others, which are no update.
        let others = text.replace("7", "8").replace("text", "other text");
        replace(&path, &others);
        test.keeps(|it| label(it).as_deref() == Some("one")).await;
        replace(&path, &others.replace("one", "two"));
        assert_eq!(label(test.next().await).as_deref(), Some("two"), "{text}");
    }
    let (_folder, test) = follow(&[("a.json", OBJECT)]).await;
    assert!(test.snapshot.cluster.services.values().all(|it| it.metadata.is_none()));
}

#[tokio::test]
async fn the_end_of_the_reader_is_the_end_of_the_source() {
    let (_folder, test) = follow(&[]).await;
    test.source.task.lock().await.abort_all();
    let ended = timeout(TIMEOUT, async { while test.source.next().await.is_some() {} });
    ended.await.unwrap();
}
