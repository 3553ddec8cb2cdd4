//! Every target with its corpus and a fixed number of mutations of it.

#![expect(clippy::unwrap_used, reason = "what fails in a helper fails the test")]

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
};

use fastrand::Rng;
use fuzz::targets::TARGETS;

/// The inputs of a corpus, sorted by name.
fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|it| (it.clone(), fs::read(it).unwrap())).collect()
}

/// Tokens with a meaning to some parser.
const WORDS: [&[u8]; 12] = [
    b"",
    b"0",
    b"-1",
    b"65536",
    b"null",
    b"Local",
    b"SCTP",
    b"fd00::1",
    b"10.0.0.1",
    b"n1",
    b"a/b",
    b"\xff\xff\xff\xff\x0f",
];

/// The next mutation, the same in every run: one of the corpus, changed in up to eight places, also with parts of others.
fn mutation(rng: &mut Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
    let Some(mut bytes) = rng.choice(corpus).cloned() else { return Vec::new() };
    for _ in 0..=rng.usize(..8) {
        let at = rng.usize(..=bytes.len());
        let end = at + rng.usize(..=(bytes.len() - at).min(24));
        let with: Vec<u8> = match rng.u8(..7) {
            // Delete, duplicate, insert a token, flip a bit, insert a byte, or insert a part of another input.
            0 => Vec::new(),
            1 => bytes[at..end].repeat(2),
            2 => WORDS[rng.usize(..WORDS.len())].to_vec(),
            3 | 4 => {
                let mut with = bytes[at..end].to_vec();
                if let Some(first) = with.first_mut() {
                    *first ^= 1 << rng.u8(..8);
                }
                with
            }
            5 => vec![rng.u8(..)],
            _ => {
                let other = &corpus[rng.usize(..corpus.len())];
                let from = rng.usize(..=other.len());
                other[from..from + rng.usize(..=(other.len() - from).min(200))].to_vec()
            }
        };
        bytes.splice(at..end, with);
    }
    bytes
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
        let bytes = mutation(&mut rng, &corpus);
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
