//! Mutations of a corpus, the same in every run.

/// A pseudorandom number generator (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.max(1))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8
    }

    /// A number below `limit`; 0 if the limit is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        if limit == 0 {
            return 0;
        }
        usize::try_from(self.next() % limit as u64).unwrap_or(0)
    }
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

/// The next input: one of the corpus, changed in up to eight places, also with parts of others.
pub fn next(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let Some(mut bytes) = corpus.get(random.below(corpus.len())).cloned() else { return Vec::new() };
    for _ in 0..=random.below(8) {
        let at = random.below(bytes.len() + 1);
        let end = at + random.below((bytes.len() - at).min(24) + 1);
        let with: Vec<u8> = match random.below(7) {
            // Delete, duplicate, insert a token, flip a bit, insert a byte, or insert a part of another input.
            0 => Vec::new(),
            1 => bytes[at..end].repeat(2),
            2 => WORDS[random.below(WORDS.len())].to_vec(),
            3 | 4 => {
                let mut with = bytes[at..end].to_vec();
                if let Some(first) = with.first_mut() {
                    *first ^= 1 << random.below(8);
                }
                with
            }
            5 => vec![u8::try_from(random.below(256)).unwrap_or(0)],
            _ => {
                let other = &corpus[random.below(corpus.len())];
                let from = random.below(other.len() + 1);
                other[from..from + random.below((other.len() - from).min(200) + 1)].to_vec()
            }
        };
        bytes.splice(at..end, with);
    }
    bytes
}
