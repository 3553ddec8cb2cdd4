//! Skipped cases and features, with the reasons.

#[derive(Clone, Debug, Default)]
pub struct Skips(Vec<(String, String)>);

/// A line that is not valid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {text:?} has no reason; write `CASE: REASON` or `FEATURE: REASON`")]
pub struct SkipsError {
    /// The number of the line, from 1.
    pub line: usize,
    pub text: String,
}

impl Skips {
    /// Parses lines `CASE: REASON`, where `CASE` may end in `*`, or is a feature: `ipv6`, `udp`, `sctp` or `node-ports`.
    /// Empty lines and those that begin with `#` are ignored.
    ///
    /// # Errors
    ///
    /// A line has no reason.
    pub fn parse(text: &str) -> Result<Self, SkipsError> {
        let mut found = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match line.split_once(':') {
                Some((name, reason)) if !name.trim().is_empty() && !reason.trim().is_empty() => {
                    found.push((name.trim().to_owned(), reason.trim().to_owned()));
                }
                _ => return Err(SkipsError { line: number, text: line.to_owned() }),
            }
        }
        Ok(Self(found))
    }

    /// Why a case or a feature is skipped, if it is.
    pub(crate) fn reason(&self, name: &str) -> Option<&str> {
        let matches = |pattern: &str| match pattern.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == pattern,
        };
        self.0.iter().find(|(pattern, _)| matches(pattern)).map(|(_, reason)| reason.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_has_a_reason() {
        let skips = Skips::parse("# a comment\n\nscale/*: too slow here\nsctp: not implemented\n").unwrap();
        assert_eq!(skips.reason("scale/churn"), Some("too slow here"));
        assert_eq!(skips.reason("sctp"), Some("not implemented"));
        assert_eq!(skips.reason("sctp/x"), None);
        let error = Skips::parse("scale/*: x\nsctp:").unwrap_err();
        assert_eq!(error, SkipsError { line: 2, text: "sctp:".to_owned() });
    }
}
