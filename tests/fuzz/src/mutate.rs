//! Mutations of a corpus, the same in every run.

use fastrand::Rng;

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

/// The next input: one of the corpus, changed in up to eight places, also with parts of others.
pub fn next(rng: &mut Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
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
