//! Prometheus' text format 0.0.4, which every scraper understands and kube-proxy serves.
//!
//! The library writes OpenMetrics. In format 0.0.4 the headers of a counter have the name of its samples (`_total`), and
//! there are no `# UNIT` lines and no `# EOF`.

pub(super) fn from_openmetrics(openmetrics: &str) -> String {
    let mut text = String::with_capacity(openmetrics.len());
    let mut lines = openmetrics.lines().peekable();
    while let Some(line) = lines.next() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        // The TYPE line follows the HELP line.
        let is_counter = |it: &str| it.starts_with("# TYPE ") && it.ends_with(" counter");
        let is_header = line.starts_with("# HELP ") && lines.peek().is_some_and(|it| is_counter(it));
        let mut words = line.splitn(4, ' ');
        match (is_header || is_counter(line), words.next(), words.next(), words.next(), words.next()) {
            (true, Some(hash), Some(keyword), Some(name), Some(rest)) => {
                text.extend([hash, " ", keyword, " ", name, "_total ", rest]);
            }
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_counters_have_the_name_of_the_samples() {
        let openmetrics = "# HELP a Of a counter.\n# TYPE a counter\na_total 1\n\
                           # HELP b_seconds A counter.\n# TYPE b_seconds gauge\n# UNIT b_seconds seconds\nb_seconds 2\n\
                           # EOF\n";
        let expect = "# HELP a_total Of a counter.\n# TYPE a_total counter\na_total 1\n\
                      # HELP b_seconds A counter.\n# TYPE b_seconds gauge\nb_seconds 2\n";
        assert_eq!(from_openmetrics(openmetrics), expect);
    }
}
