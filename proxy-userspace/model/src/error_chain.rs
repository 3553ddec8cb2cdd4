//! Errors as text.

use std::error::Error;

/// An error and its causes in one line. A cause whose text was there already is left out, as many errors repeat it.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let part = cause.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Caused(&'static str, Option<Box<Caused>>);

    impl fmt::Display for Caused {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Caused {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|it| it as _)
        }
    }

    #[test]
    fn a_cause_is_named_once() {
        let cause = |text, cause| Some(Box::new(Caused(text, cause)));
        let error = Caused("cannot start: no file", cause("no file", cause("ENOENT", None)));
        assert_eq!(error_chain(&error), "cannot start: no file: ENOENT");
        assert_eq!(error_chain(&Caused("alone", None)), "alone");
    }
}
