//! Prometheus' text format 0.0.4, which every scraper understands and kube-proxy serves.
//!
//! The library writes OpenMetrics. In format 0.0.4 the headers of a counter have the name of its samples (`_total`), and
//! there is no `# EOF`. No metric has a unit.

pub(super) fn from_openmetrics(openmetrics: &str) -> String {
    let mut text = String::with_capacity(openmetrics.len());
    let mut lines = openmetrics.lines().take_while(|it| *it != "# EOF").peekable();
    while let Some(line) = lines.next() {
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
