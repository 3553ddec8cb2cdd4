//! Every target with its corpus and a fixed number of mutations of it.

#![expect(clippy::unwrap_used, reason = "what fails in a helper fails the test")]

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
};

use fastrand::Rng;
use fuzz::{mutate, targets::TARGETS};

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

fn check(name: &str, mutations: usize) {
    let (_, target) = TARGETS.into_iter().find(|(it, _)| *it == name).unwrap();
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
                check(stringify!($target), $mutations);
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
    let targets = TARGETS.map(|(name, _)| name);
    let folder = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")).unwrap();
    let mut corpora: Vec<_> = folder.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    corpora.sort();
    assert_eq!(corpora, targets);
    for it in targets {
        assert!(TESTED.contains(&it), "{it} has a test");
    }
}
