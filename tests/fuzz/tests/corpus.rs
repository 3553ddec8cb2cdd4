//! Every target with its corpus and a fixed number of mutations of it.

#![expect(clippy::unwrap_used, reason = "what fails in a helper fails the test")]

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
};

use fastrand::Rng;
use fuzz::{
    api_list, api_watch, brain, certificates, change_sets, cluster, compile, config, maps, mutate, netlink,
    nft_tables, pages, parser, wire,
};

/// The inputs of a corpus, sorted by name.
fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|it| (it.clone(), fs::read(it).unwrap())).collect()
}

/// Calls a target; stores the input if it panics.
fn run(name: &str, target: fn(&[u8]), bytes: &[u8], what: &str) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(bytes))) {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-crash"));
        fs::write(&file, bytes).unwrap();
        eprintln!("{what} violates an invariant; the input is in {}", file.display());
        resume_unwind(panic);
    }
}

fn check(name: &str, target: fn(&[u8]), mutations: usize) {
    let corpus = corpus(name);
    assert!(corpus.len() >= 5, "the corpus is not empty");
    for (file, bytes) in &corpus {
        run(name, target, bytes, &file.display().to_string());
    }
    let corpus: Vec<_> = corpus.into_iter().map(|(_, bytes)| bytes).collect();
    let mut rng = Rng::with_seed(1);
    for round in 0..mutations {
        let bytes = mutate::next(&mut rng, &corpus);
        run(name, target, &bytes, &format!("mutation {round} of the corpus"));
    }
}

/// A test for each target, with the number of mutations.
macro_rules! tests {
    ($($test:ident: $target:ident, $mutations:literal;)*) => {
        const TESTED: &[&str] = &[$(stringify!($target)),*];

        $(
            #[test]
            fn $test() {
                check(stringify!($target), $target::target, $mutations);
            }
        )*
    };
}

tests! {
    no_manifest_violates_an_invariant: parser, 5_000;
    no_message_violates_an_invariant: wire, 20_000;
    no_cluster_state_of_another_brain_violates_an_invariant: cluster, 20_000;
    no_history_of_a_cluster_violates_an_invariant: brain, 5_000;
    no_list_of_an_api_server_violates_an_invariant: api_list, 3_000;
    no_watch_of_an_api_server_violates_an_invariant: api_watch, 3_000;
    no_change_set_of_a_brain_violates_an_invariant: change_sets, 10_000;
    no_configuration_violates_an_invariant: config, 3_000;
    no_content_of_pinned_maps_violates_an_invariant: maps, 5_000;
    no_datagram_of_the_kernel_violates_an_invariant: netlink, 20_000;
    no_content_of_nftables_violates_an_invariant: nft_tables, 300;
    no_history_of_states_leaves_anything_in_the_tables: compile, 300;
    no_certificate_violates_an_invariant: certificates, 20_000;
    no_request_for_pages_violates_an_invariant: pages, 2_000;
}

#[test]
fn every_target_has_a_corpus_and_a_test() {
    let names = |folder: &str| -> Vec<String> {
        let files = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
        let mut names: Vec<_> =
            files.map(|it| it.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    let targets = names("targets");
    assert_eq!(targets, names("corpus"));
    for it in targets {
        assert!(TESTED.contains(&it.as_str()), "{it} has a test");
    }
}
