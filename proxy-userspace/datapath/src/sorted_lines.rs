//! Lines in order, however many there are, without memory for all of them.

use std::ops::Range;

/// How much text one pass keeps, in bytes.
const MAX_PASS: usize = 2 << 20;

/// The smallest lines of what is listed that come after another one, in order.
#[derive(Debug, Default)]
pub struct SortedLines {
    /// In one buffer: allocations of single lines that come and go would leave holes.
    text: String,
    lines: Vec<Range<u32>>,
    after: String,
    /// From this line on, all are for another pass.
    limit: Option<String>,
    max_pass: usize,
}

impl SortedLines {
    /// The lines after this one; the empty one is before all.
    pub fn after(line: &str) -> Self {
        Self { after: line.to_owned(), max_pass: MAX_PASS, ..Self::default() }
    }

    /// Adds a line of any order.
    pub fn add(&mut self, line: &str) {
        if *line <= *self.after || self.limit.as_deref().is_some_and(|it| line >= it) {
            return;
        }
        let start = self.text.len() as u32;
        self.text.push_str(line);
        self.lines.push(start..self.text.len() as u32);
        if self.text.len() > self.max_pass && self.lines.len() > 1 {
            self.keep_half();
        }
    }

    fn keep_half(&mut self) {
        self.sort();
        let rest = self.lines.split_off(self.lines.len() / 2);
        self.limit = rest.first().map(|it| line(&self.text, it).to_owned());
        let mut text = String::with_capacity(self.text.len());
        for it in &mut self.lines {
            let start = text.len() as u32;
            text.push_str(line(&self.text, it));
            *it = start..text.len() as u32;
        }
        self.text = text;
    }

    fn sort(&mut self) {
        self.lines.sort_unstable_by(|a, b| line(&self.text, a).cmp(line(&self.text, b)));
    }

    pub fn sorted(&mut self) -> impl DoubleEndedIterator<Item = &str> {
        self.sort();
        self.lines.iter().map(|it| line(&self.text, it))
    }

    /// Whether there are others after them, for another pass.
    pub fn has_more(&self) -> bool {
        self.limit.is_some()
    }
}

fn line<'a>(text: &'a str, range: &Range<u32>) -> &'a str {
    &text[range.start as usize..range.end as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_together_have_every_line_in_order() {
        let all: Vec<_> = (0..1000_u32).map(|n| format!("line {}", n.wrapping_mul(2_654_435_761))).collect();
        let (mut found, mut passes, mut has_more) = (Vec::<String>::new(), 0, true);
        while has_more {
            let after = found.last().map_or("", String::as_str);
            let mut pass = SortedLines { max_pass: 5_000, ..SortedLines::after(after) };
            all.iter().for_each(|it| pass.add(it));
            found.extend(pass.sorted().map(ToOwned::to_owned));
            (passes, has_more) = (passes + 1, pass.has_more());
            assert!(pass.text.len() <= 5_000);
        }
        let mut expect = all;
        expect.sort_unstable();
        assert_eq!(found, expect);
        assert!(passes > 3);
    }
}
