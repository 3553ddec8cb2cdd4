//! Rules for the code itself, and docs/claims.md.

mod module_graph;

use std::{fs, path::Path};

use self::module_graph::{Edges, crate_edges, cycles};
use build_tools::{command::workspace, files_below};

/// Every Rust file below a folder, by its path from the workspace, with its text.
fn sources(folder: &str) -> Vec<(String, String)> {
    let mut files = files_below(&workspace().join(folder)).unwrap();
    files.retain(|it| it.extension().is_some_and(|it| it == "rs"));
    let name = |it: &Path| it.strip_prefix(workspace()).unwrap().display().to_string();
    files.iter().map(|it| (name(it), fs::read_to_string(it).unwrap())).collect()
}

const FOLDERS: [&str; 7] =
    ["backends", "proto", "proxy-common", "proxy-ebpf", "proxy-userspace", "tests", "xtask"];

/// The dependencies that a crate's manifest names in its section `[dependencies]`.
fn dependencies(manifest: &str) -> Vec<String> {
    let text = fs::read_to_string(workspace().join(manifest)).unwrap();
    let section = text.split("\n[").find(|it| it.starts_with("dependencies]")).unwrap_or_default();
    section
        .lines()
        .skip(1)
        .filter_map(|it| it.split(['.', ' ', '=']).next().filter(|it| !it.is_empty() && !it.starts_with('#')))
        .map(ToOwned::to_owned)
        .collect()
}

/// Every crate of the workspace with its folder, from the highest layer to the lowest.
fn layers() -> Vec<(String, String)> {
    let read = |folder: &str| fs::read_to_string(workspace().join(folder).join("Cargo.toml")).unwrap();
    let layer = |folder: &str| {
        let manifest = read(folder);
        let name = manifest.lines().find_map(|it| it.strip_prefix("name = \"")?.strip_suffix('"')).unwrap();
        (name.to_owned(), folder.to_owned())
    };
    let manifest = read("");
    let members = manifest.split("members = [").nth(1).unwrap().split(']').next().unwrap();
    members.split('"').skip(1).step_by(2).map(layer).collect()
}

/// Crates with folders, from the highest folder to the lowest.
const FOLDERS_OF_CRATES: [(&str, &[&str]); 2] = [
    ("datapath-ebpf", &["observe", "programs", "maps", "tables", "host"]),
    ("datapath-nft", &["observe", "apply", "plan", "encode"]),
];

#[test]
fn modules_import_in_one_direction() {
    let layers = layers();
    let layer = |name: &str| layers.iter().position(|(it, _)| it.replace('-', "_") == name.replace('-', "_"));
    let mut edges = Edges::new();
    let mut errors = Vec::new();
    for (name, folder) in &layers {
        let source = workspace().join(folder).join("src");
        for root in ["lib.rs", "main.rs"].map(|it| source.join(it)) {
            if root.exists() {
                edges.extend(crate_edges(&root, workspace()));
            }
        }
        let dependencies = dependencies(&format!("{folder}/Cargo.toml"));
        let upward = dependencies.iter().filter(|it| layer(it).is_some_and(|it| Some(it) <= layer(name)));
        errors.extend(upward.map(|it| format!("{name} depends on {it}, which is above it\n")));
    }
    assert!(edges.len() > 300, "{} uses", edges.len());
    errors.extend(cycles(&edges));
    for ((from, to), names) in &edges {
        for (name, folders) in FOLDERS_OF_CRATES {
            let folder =
                |file: &str| folders.iter().position(|it| file.contains(&format!("{name}/src/{it}/")));
            if folder(from).zip(folder(to)).is_some_and(|(from, to)| to < from) {
                errors.push(format!("{from} uses {names:?} of {to}, which is above it\n"));
            }
        }
    }
    assert!(errors.is_empty(), "{}", errors.concat());
}

#[test]
fn a_cycle_is_found_behind_re_exports_macros_and_globs() {
    let folder = tempfile::tempdir().unwrap();
    let check = |files: &[(&str, &str)], expected: &[&str]| {
        let source = folder.path().join("src");
        let _ = fs::remove_dir_all(&source);
        for (name, text) in files {
            let file = source.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let cycles = cycles(&crate_edges(&source.join("lib.rs"), folder.path())).concat();
        assert_eq!(cycles.is_empty(), expected.is_empty(), "{cycles}");
        for it in expected {
            assert!(cycles.contains(it), "{it} is not in {cycles}");
        }
    };
    const ROOT: (&str, &str) = ("lib.rs", "mod a; mod b; pub use b::Two;");
    check(
        &[ROOT, ("a.rs", "use crate::Two; pub struct One(Two);"), ("b.rs", "pub struct Two(super::a::One);")],
        &["src/a.rs uses Two of src/b.rs", "src/b.rs uses One of src/a.rs"],
    );
    check(
        &[
            ROOT,
            ("a.rs", "use super::*; pub fn one(_: Two) {}"),
            ("b.rs", "pub struct Two; fn f() { g!(crate::a::one()) }"),
        ],
        &["src/a.rs uses Two of src/b.rs", "src/b.rs uses one of src/a.rs"],
    );
    // A parent that only re-exports is not part of a cycle; one that uses its child is.
    let child = ("b.rs", "mod c; use crate::TOP; pub struct Two;");
    let leaf = ("b/c.rs", "use super::super::TOP;");
    check(&[("lib.rs", "mod b; pub use b::Two; pub const TOP: u8 = 1;"), child, leaf], &[]);
    check(
        &[("lib.rs", "mod b; pub use b::Two; pub const TOP: Two = Two;"), child, leaf],
        &["src/b.rs uses TOP of src/lib.rs", "src/lib.rs uses Two of src/b.rs"],
    );
    // Another crate's items belong to no file that re-exports them.
    let reexporting = ("a.rs", "pub use other::X; use crate::b::Two; pub struct One(Two);");
    check(&[ROOT, reexporting, ("b.rs", "use crate::a::X; pub struct Two(X);")], &[]);
    // Tests may use what they test.
    let tested = ("a.rs", "pub struct One; #[cfg(test)] mod tests { use crate::b::Two; }");
    check(&[ROOT, tested, ("b.rs", "use crate::a::One; pub struct Two(One);")], &[]);
}

#[test]
fn the_brain_and_compile_are_pure() {
    const IMPURE: [&str; 11] = [
        "fs::",
        "io::",
        "env::",
        "process::",
        "thread::",
        "Instant",
        "SystemTime",
        "UdpSocket",
        "tokio",
        "tracing",
        "rand::",
    ];
    let datapaths = ["ebpf", "nft"].map(|it| sources(&format!("proxy-userspace/datapath-{it}/src")));
    let compile = datapaths
        .into_iter()
        .flatten()
        .filter(|(file, _)| file.ends_with("compile.rs") || file.contains("/layout"));
    let brain = sources("proxy-userspace/brain/src").into_iter().filter(|(file, _)| !file.contains("tests"));
    let mut files = 0;
    for (file, text) in brain.chain(compile) {
        files += 1;
        for it in IMPURE {
            assert!(!text.contains(it), "{file} uses {it}");
        }
    }
    assert!(files > 4);
    for it in dependencies("proxy-userspace/brain/Cargo.toml") {
        assert!(!IMPURE.contains(&it.as_str()), "the brain depends on {it}");
    }
}

#[test]
fn backends_depend_on_the_contract_alone() {
    let layers = layers();
    let backends = layers.iter().filter(|(_, folder)| folder.starts_with("backends/"));
    let mut count = 0;
    for (name, folder) in backends {
        let manifest = fs::read_to_string(workspace().join(folder).join("Cargo.toml")).unwrap();
        // After the package, whose key `publish` is also the name of a crate.
        let (_, manifest) = manifest.split_once("\n[").unwrap();
        let is_named = |it: &str| manifest.lines().any(|line| line.split(['.', ' ', '=']).next() == Some(it));
        let own: Vec<_> = layers.iter().map(|(it, _)| it.as_str()).filter(|it| is_named(it)).collect();
        assert_eq!(own, ["proxy-contract"], "{name}");
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn unsafe_lives_in_one_module_per_concern() {
    let ours = file!();
    let with_unsafe: Vec<_> = ["backends", "proto", "proxy-common", "proxy-userspace", "tests", "xtask"]
        .into_iter()
        .flat_map(sources)
        .filter(|(file, _)| file != ours)
        .filter(|(_, text)| ["unsafe {", "unsafe fn", "unsafe impl"].iter().any(|it| text.contains(it)))
        .map(|(file, _)| file)
        .collect();
    assert_eq!(
        with_unsafe,
        ["proxy-userspace/datapath-ebpf/src/host/raw_bpf.rs", "proxy-userspace/process/src/lib.rs"]
    );
}

#[test]
fn every_file_has_a_module_doc() {
    for (file, text) in FOLDERS.into_iter().flat_map(sources) {
        assert!(text.starts_with("//! "), "{file} does not begin with `//!`");
    }
}

/// The last cell of each row names tests or scenarios in backquotes.
#[test]
fn every_claim_names_its_tests() {
    let sources: String = FOLDERS.into_iter().flat_map(sources).map(|(_, text)| text).collect();
    let scenarios = files_below(&workspace().join("tests/scenarios")).unwrap().into_iter();
    let scenarios: String = scenarios.map(|it| fs::read_to_string(it).unwrap()).collect();
    let text = fs::read_to_string(workspace().join("docs/claims.md")).unwrap();
    let rows: Vec<_> =
        text.lines().filter(|it| it.starts_with("| ") && !it.starts_with("| claim |")).collect();
    assert!(rows.len() > 90, "{} claims", rows.len());
    for row in rows {
        let tests = row.rsplit('|').nth(1).unwrap();
        let names: Vec<_> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test in {row}");
        for name in names {
            let is_test = sources.contains(&format!("fn {name}("));
            let is_scenario = scenarios.contains(&format!("\nname: {name}\n"));
            assert!(is_test || is_scenario, "there is no test or scenario {name}");
        }
    }
}
