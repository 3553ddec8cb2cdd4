//! The harness itself.

use std::{path::PathBuf, process::Command};

use aya::maps::{Array, MapData};
use tests::{
    ObjectKind, ObjectTracker, Sandbox, TIMEOUT, eventually, requirements, sandbox::remove_stale,
    skip::current_test,
};

fn own_cgroup() -> String {
    let text = std::fs::read_to_string("/proc/self/cgroup").expect("/proc is mounted");
    text.lines().find_map(|it| it.strip_prefix("0::")).expect("cgroup2 is mounted").to_owned()
}

#[test]
fn a_test_knows_its_name() {
    assert_eq!(current_test(), "a_test_knows_its_name");
}

#[test]
fn a_sandbox_leaves_no_trace() {
    let Some(sandbox) = Sandbox::or_skip() else { return };
    let home = own_cgroup();
    let folders: Vec<PathBuf> = [sandbox.cgroup(), sandbox.pins(), sandbox.files()].map(Into::into).into();
    let inside = sandbox.enter().unwrap();
    assert!(own_cgroup().ends_with(sandbox.name()), "{} is not in {}", own_cgroup(), sandbox.name());
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    drop(inside);
    assert_eq!(own_cgroup(), home);

    drop(sandbox);
    assert!(child.wait().unwrap().code().is_none(), "the child is killed with its sandbox");
    for folder in folders {
        assert!(!folder.exists(), "{} is left", folder.display());
    }
}

#[test]
fn the_sandbox_of_an_ended_process_is_removed() {
    let Some(sandbox) = Sandbox::or_skip() else { return };
    let host = requirements().unwrap();
    // No process has this id: it is above the kernel's limit.
    let stale = host.cgroup2.join("kpe-sandbox-gone-4194305");
    std::fs::create_dir(&stale).unwrap();
    // There may be others: of tests that have failed.
    assert!(remove_stale(&host).iter().any(|it| it == "kpe-sandbox-gone-4194305"));
    assert!(!stale.exists());
    assert!(sandbox.cgroup().exists());
}

#[test]
fn kernel_objects_of_a_sandbox_are_counted_and_leaks_are_found() {
    let Some(sandbox) = Sandbox::or_skip() else { return };
    let mut objects = ObjectTracker::new(&sandbox);
    let before = objects.counts();
    let mut with_map = before.clone();
    *with_map.entry(ObjectKind::Map).or_default() += 1;
    let pin = sandbox.pins().join("map");
    let elsewhere = sandbox.pins().with_file_name(format!("{}-leak", sandbox.name()));
    let map = Array::<_, u32>::create(1, 0).unwrap();
    assert_eq!(objects.counts(), with_map, "held open by this process");
    map.pin(&pin).unwrap();
    assert_eq!(objects.counts(), with_map, "pinned");
    assert!(objects.leaked().is_empty());
    // A pin outside the sandbox stands for any reference that is not the sandbox's.
    MapData::from_pin(&pin).unwrap().pin(&elsewhere).unwrap();
    std::fs::remove_file(&pin).unwrap();
    assert_eq!(objects.counts(), before);
    assert_eq!(objects.leaked().iter().map(|it| it.0).collect::<Vec<_>>(), [ObjectKind::Map]);
    std::fs::remove_file(elsewhere).unwrap();
    assert!(eventually(TIMEOUT, || objects.leaked().is_empty()));
}
