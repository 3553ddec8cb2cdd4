//! The blocks of `docs/performance.md` and its plots, from the records.
//! Invariant: what lies between `<!-- figures: NAME -->` and `<!-- /figures -->` is generated, and nothing else is.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    iter,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    connect,
    figures::{Figures, Row},
    nft, outside,
    plot::{Line, Plot, Scale, Unit, number},
    proxy_command::OWN,
    proxy_figures::{Pair, ProxyFigures, SizeFigures, Start},
    record::{Record, Records},
};

const BEGIN: &str = "<!-- figures: ";
const END: &str = "<!-- /figures -->";

#[derive(Debug, Default)]
pub(crate) struct Page {
    /// By the name of the block.
    blocks: BTreeMap<&'static str, String>,
    /// SVG, by the name of the file in `docs/pictures`.
    pub(crate) pictures: BTreeMap<String, String>,
}

/// The beginning of the name of every generated picture.
pub(crate) const PICTURE_PREFIX: &str = "bench-";

impl Page {
    pub(crate) fn new(records: &Records) -> Result<Self> {
        let mut page = Self::default();
        let compared = records.of("proxies").find(|it| it.figures.proxies.keys().any(|it| !is_own(it)));
        let compared = compared.context("no record compares proxies")?;
        page.changes("change", compared)?;
        page.starts("start", compared)?;
        page.connects("connect-compared", compared);
        page.backends(records, compared);
        // A newer run that had no others to measure.
        let alone = records.newest("proxies").filter(|it| it.file != compared.file);
        page.blocks.insert("change-alone", not_recorded("proxies"));
        if let Some(alone) = alone {
            page.changes("change-alone", alone)?;
        }
        page.plot_rows(records, "connect", |it| Plot {
            title: "connect() and close() of a TCP socket over loopback (median)".into(),
            x_title: "Services",
            y_scale: Scale::Linear,
            y_unit: Unit::Microseconds,
            lines: lines(it, 1e3, &[(connect::DIRECT, 5), (connect::ONE, 0), (connect::ANY, 2)]),
        })?;
        page.programs(records);
        page.plot_rows(records, "nft", |it| Plot {
            title: "nftables path: from a received state until packets see it".into(),
            x_title: "Services",
            y_scale: Scale::Logarithmic,
            y_unit: Unit::Milliseconds,
            lines: lines(it, 1.0, &[(nft::ENDPOINT, 0), (nft::SERVICE, 1), (nft::LOAD, 2)]),
        })?;
        page.plot_rows(records, "outside", |it| Plot {
            title: "The program that packets from outside meet first".into(),
            x_title: "frontends that are forwarded",
            y_scale: Scale::Linear,
            y_unit: Unit::Nanoseconds,
            lines: lines(it, 1.0, &[(outside::PASSES, 5), (outside::HOT, 0), (outside::RANDOM, 2)]),
        })?;
        for subject in ["apply", "file", "fleet", "scale"] {
            let text =
                records.newest(subject).map_or_else(|| not_recorded(subject), |it| rows(it) + &origin(it));
            page.blocks.insert(subject, text);
        }
        Ok(page)
    }

    pub(crate) fn fill(&self, text: &str) -> Result<String> {
        let (mut filled, mut rest, mut used) = (String::new(), text, BTreeSet::new());
        while let Some((before, begun)) = rest.split_once(BEGIN) {
            let (name, old) = begun.split_once(" -->\n").context("a block has no name")?;
            let (old, after) = old.split_once(END).with_context(|| format!("the block {name} has no end"))?;
            if old.contains(BEGIN) {
                bail!("the block {name} has no end before the next one");
            }
            let block = self.blocks.get(name).with_context(|| {
                format!("no figures are named {name:?}, only {:?}", self.blocks.keys().collect::<Vec<_>>())
            })?;
            let _ = write!(
                filled,
                "{before}{BEGIN}{name} -->\n\n{block}{}{END}",
                if block.is_empty() { "" } else { "\n" }
            );
            used.insert(name);
            rest = after;
        }
        if let Some(unused) = self.blocks.keys().find(|it| !used.contains(**it)) {
            bail!("the page has no block for the figures {unused:?}");
        }
        Ok(filled + rest)
    }

    fn picture(&mut self, name: &str, plot: &Plot) -> Result<String> {
        let file = format!("{PICTURE_PREFIX}{name}.svg");
        let alt = format!("{}, by {}.", plot.title, plot.x_title);
        self.pictures.insert(file.clone(), plot.svg()?);
        Ok(format!("![{alt}](pictures/{file})\n\n"))
    }

    fn changes(&mut self, block: &'static str, record: &Record) -> Result<()> {
        let proxies = &record.figures.proxies;
        let plot = |title: &str, figure: fn(&SizeFigures) -> Option<f64>| {
            by_size(proxies, title, Unit::Milliseconds, figure)
        };
        let latency = plot("From the change of an endpoint until the first connect sees it (median)", |it| {
            Some(it.change?.visible_ms.p50)
        });
        let cpu = plot("CPU time of the proxy per change", |it| Some(it.change?.cpu_ms_per_change));
        let mut text = self.picture(block, &latency)? + &self.picture(&format!("{block}-cpu"), &cpu)?;
        text += &table_by_size(proxies, |it| {
            it.change
                .map(|it| format!("{} ({})", milliseconds(it.visible_ms.p50), short(it.cpu_ms_per_change)))
        });
        self.blocks.insert(block, text + &origin(record));
        Ok(())
    }

    fn starts(&mut self, block: &'static str, record: &Record) -> Result<()> {
        let proxies = &record.figures.proxies;
        let start =
            by_size(proxies, "From exec to the first connect that is served", Unit::Milliseconds, |it| {
                Some(it.start?.cold_start_s * 1e3)
            });
        let memory =
            by_size(proxies, "Resident memory after the start", Unit::Megabytes, |it| Some(it.start?.rss_mb));
        let mut text = self.picture(block, &start)? + &self.picture(&format!("{block}-memory"), &memory)?;
        text += &table_by_size(proxies, |it| {
            it.start.map(|it| format!("{:.1} s, {:.0} MB", it.cold_start_s, it.rss_mb))
        });
        self.blocks.insert(block, text + &origin(record));
        Ok(())
    }

    /// Connects through Services and straight to endpoints.
    fn connects(&mut self, block: &'static str, record: &Record) {
        let mut text = String::from(
            "| | Services | straight to an endpoint | through one Service | ratio ¹ | random endpoint | through a random Service | ratio ¹ |\n\
             |---|---|---|---|---|---|---|---|\n",
        );
        for (name, sizes) in ordered(&record.figures.proxies) {
            for (services, it) in sizes {
                let Some(it) = it.connect else { continue };
                let cells = |it: Pair| {
                    let ratio = it.vip.over_bare.map_or_else(|| "–".into(), |it| format!("{it:.2}"));
                    format!("{:.1} µs | {:.1} µs | {ratio}", it.bare.p50 / 1e3, it.vip.p50 / 1e3)
                };
                let services = number(f64::from(*services));
                let _ = writeln!(text, "| {name} | {services} | {} | {} |", cells(it.tcp), cells(it.random));
            }
        }
        self.blocks.insert(block, text + &origin(record));
    }

    /// Backends on the contract, above other proxies at as many Services.
    fn backends(&mut self, records: &Records, compared: &Record) {
        let Some(record) = records.newest("backends") else {
            self.blocks.insert("backends", not_recorded("backends"));
            return;
        };
        let figures = &record.figures;
        let mut text = format!(
            "{}\n\n\
             | | Services | a connect sees a change, median | 99 % | at most | CPU of a change | start | CPU of the start | resident |\n\
             |---|---|---|---|---|---|---|---|---|\n",
            figures.method
        );
        for (name, sizes) in ordered(&figures.proxies) {
            text.extend(sizes.iter().map(|(services, it)| backend_row(name, *services, it)));
        }
        let sizes: BTreeSet<&u32> = figures.proxies.values().flat_map(BTreeMap::keys).collect();
        for (name, others) in compared.figures.proxies.iter().filter(|it| !is_own(it.0)) {
            let others = others.iter().filter(|it| sizes.contains(it.0));
            text.extend(others.map(|(services, it)| backend_row(&format!("{name} ²"), *services, it)));
        }
        text += &origin(record);
        let _ = writeln!(text, "\n² Of [another run](figures/{}), with 10 endpoints.", compared.file);
        self.blocks.insert("backends", text);
    }

    /// The run times of the connect program, a row for each kernel.
    fn programs(&mut self, records: &Records) {
        let mut kernels = BTreeSet::new();
        let mut text = String::new();
        for it in records.of("connect") {
            let figures = &it.figures;
            if !kernels.insert(&it.origin.kernel) {
                continue;
            }
            let largest = |name| figures.points(name).last().map(|it| it.1);
            let at_100 = |name| figures.points(name).first().map(|it| it.1);
            let cell = |it: Option<f64>| it.map_or_else(|| "–".into(), |it| format!("{it:.0} ns"));
            let _ = writeln!(
                text,
                "| Linux {} | {} | {} | {} | {} |",
                it.origin.kernel,
                cell(largest(connect::PROGRAM_MISS)),
                cell(largest(connect::PROGRAM_HIT)),
                cell(at_100(connect::PROGRAM_ANY)),
                cell(largest(connect::PROGRAM_ANY)),
            );
        }
        if !text.is_empty() {
            text = format!(
                "| the program at a TCP connect | to no Service | to one Service | to a random one of 100 | to a random one of 50,000 |\n\
                 |---|---|---|---|---|\n{text}"
            );
        }
        self.blocks.insert("programs", text);
    }

    fn plot_rows(
        &mut self,
        records: &Records,
        subject: &'static str,
        plot: impl FnOnce(&Figures) -> Plot,
    ) -> Result<()> {
        let mut text = not_recorded(subject);
        if let Some(it) = records.newest(subject) {
            text.clear();
            let mut plot = plot(&it.figures);
            plot.lines.retain(|it| !it.points.is_empty());
            if !plot.lines.is_empty() {
                text += &self.picture(subject, &plot)?;
            }
            text += &rows(it);
            text += &origin(it);
        }
        self.blocks.insert(subject, text);
        Ok(())
    }
}

fn is_own(proxy: &str) -> bool {
    proxy.starts_with(OWN)
}

/// Ours first.
fn ordered(proxies: &ProxyFigures) -> impl Iterator<Item = (&String, &BTreeMap<u32, SizeFigures>)> {
    let of = |own| proxies.iter().filter(move |it| is_own(it.0) == own);
    of(true).chain(of(false))
}

fn backend_row(name: &str, services: u32, it: &SizeFigures) -> String {
    let services = number(services.into());
    if let Some(reason) = &it.failure {
        return format!("| {name} | {services} | {reason} | | | | | | |\n");
    }
    let ms = |it: Option<f64>| it.map_or_else(|| "–".into(), milliseconds);
    let start = |figure: fn(&Start) -> String| it.start.as_ref().map_or_else(|| "–".into(), figure);
    let cells = [
        ms(it.change.map(|it| it.visible_ms.p50)),
        ms(it.change.and_then(|it| it.visible_ms.p99)),
        ms(it.change.map(|it| it.visible_ms.max)),
        ms(it.change.map(|it| it.cpu_ms_per_change)),
        start(|it| format!("{:.1} s", it.cold_start_s)),
        start(|it| format!("{:.2} s", it.cpu_start_s)),
        start(|it| format!("{:.0} MB", it.rss_mb)),
    ];
    format!("| {name} | {services} | {} |\n", cells.join(" | "))
}

/// A figure of all proxies by the number of Services.
fn by_size(proxies: &ProxyFigures, title: &str, unit: Unit, figure: fn(&SizeFigures) -> Option<f64>) -> Plot {
    let lines = ordered(proxies).enumerate().map(|(color, (name, sizes))| Line {
        name: name.clone(),
        points: sizes.iter().filter_map(|(services, it)| Some((f64::from(*services), figure(it)?))).collect(),
        color,
        is_dashed: color == 1,
    });
    Plot {
        title: title.to_owned(),
        x_title: "Services",
        y_scale: Scale::Logarithmic,
        y_unit: unit,
        lines: lines.filter(|it| !it.points.is_empty()).collect(),
    }
}

fn table_by_size(proxies: &ProxyFigures, cell: fn(&SizeFigures) -> Option<String>) -> String {
    let sizes: BTreeSet<u32> = proxies.values().flat_map(BTreeMap::keys).copied().collect();
    let header: Vec<_> = sizes.iter().map(|it| number(f64::from(*it))).collect();
    let mut text = format!("| Services | {} |\n|---|{}\n", header.join(" | "), "---|".repeat(sizes.len()));
    for (name, figures) in ordered(proxies) {
        let cells = sizes.iter().map(|it| {
            let figures = figures.get(it);
            let failure = || figures?.failure.clone();
            figures.and_then(cell).or_else(failure).unwrap_or_else(|| "–".into())
        });
        let _ = writeln!(text, "| {name} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
    text
}

/// Series of a subject as lines, each with its color; the unit of the plot is so many of the figures'.
fn lines(figures: &Figures, unit: f64, series: &[(&str, usize)]) -> Vec<Line> {
    let line = |&(name, color): &(&str, usize)| {
        let points = figures.points(name).iter().map(|(x, y)| (*x, y / unit)).collect();
        Line { name: name.to_owned(), points, color, is_dashed: false }
    };
    series.iter().map(line).collect()
}

/// A row of a subject, and the indented ones below it.
type Part = [Row];

/// The case of a part, if it has one, and the names of its figures.
fn names(part: &Part) -> (&str, Vec<&str>) {
    let first = part[0].case.as_str();
    let (case, first) = first.split_once(": ").unwrap_or(("", first));
    (case, iter::once(first).chain(part[1..].iter().map(|it| it.case.trim_start())).collect())
}

/// The figures of a subject beside their goals. Cases with the same figures share a table, with a row for each case.
fn rows(record: &Record) -> String {
    let figures = &record.figures;
    let mut text = format!("{}\n", figures.method);
    let parts: Vec<&Part> = figures.rows.chunk_by(|_, next| next.case.starts_with(' ')).collect();
    let mut is_list = false;
    for cases in parts.chunk_by(|one, next| one.len() > 2 && names(one).1 == names(next).1) {
        if let [part] = cases {
            if !is_list {
                text += "\n| | measured (at most) |\n|---|---|\n";
            }
            text.extend(part.iter().map(list_row));
        } else {
            let header = names(cases[0]).1;
            let _ = writeln!(
                text,
                "\n| measured (at most) | {} |\n|---|{}",
                header.join(" | "),
                "---|".repeat(header.len())
            );
            for part in cases {
                let cells: Vec<_> = part.iter().map(cell).collect();
                let _ = writeln!(text, "| {} | {} |", names(part).0, cells.join(" | "));
            }
        }
        is_list = cases.len() == 1;
    }
    text
}

fn list_row(row: &Row) -> String {
    let case = row.case.trim_start();
    let indent = if case.len() < row.case.len() { "&emsp;" } else { "" };
    format!("| {indent}{case} | {} |\n", cell(row))
}

/// A figure with its goal in brackets.
fn cell(row: &Row) -> String {
    let goal = row.goal_text().replace("<= ", "");
    let missed = if row.is_missed() { ", missed" } else { "" };
    if goal.is_empty() { row.text() } else { format!("{} ({goal}{missed})", row.text()) }
}

fn not_recorded(subject: &str) -> String {
    format!("Nothing is recorded yet: `cargo xtask bench report --only {subject}`.\n")
}

fn origin(record: &Record) -> String {
    let it = &record.origin;
    let versions =
        it.versions.iter().map(|(name, version)| format!(", {name} {version}")).collect::<String>();
    let disturbance = it.disturbance().map_or_else(String::new, |it| format!(", **{it}**"));
    format!(
        "\n*{}, commit {}: {}{versions}{disturbance} ([record](figures/{})).*\n",
        it.date, it.commit, it.machine, record.file
    )
}

/// A time of so many milliseconds, with two or three digits.
fn milliseconds(time: f64) -> String {
    if time < 10.0 { format!("{time:.1} ms") } else { format!("{} ms", number(time.round())) }
}

fn short(value: f64) -> String {
    if value < 10.0 { format!("{value:.1}") } else { number(value.round()) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use build_tools::command::workspace;

    use super::*;
    use crate::{
        proxy_figures::{Change, Spread},
        record,
    };

    #[test]
    fn the_page_and_its_plots_are_what_the_records_give() {
        let records = Records::read(&record::folder()).unwrap();
        let page = Page::new(&records).unwrap();
        assert_eq!(page.pictures, Page::new(&records).unwrap().pictures, "the same records give other bytes");
        let remedy = "run `cargo xtask bench report --from-records`";
        let docs = workspace().join("docs");
        let text = fs::read_to_string(docs.join("performance.md")).unwrap();
        assert!(page.fill(&text).unwrap() == text, "docs/performance.md differs from the records: {remedy}");
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(docs.join("pictures")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name.starts_with(PICTURE_PREFIX) {
                files.insert(name, fs::read_to_string(&path).unwrap());
            }
        }
        assert!(files == page.pictures, "docs/pictures differs from the records: {remedy}");
    }

    #[track_caller]
    fn check_refused(text: &str, expected: &str) {
        let page = Page { blocks: BTreeMap::from([("start", "1 s\n".to_owned())]), ..Page::default() };
        let error = format!("{:#}", page.fill(text).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn a_backend_has_its_figures_or_the_reason_for_their_lack() {
        let skipped =
            SizeFigures { failure: Some("the kernel has no ip_vs".into()), ..SizeFigures::default() };
        let row = backend_row("ipvs", 1_000, &skipped);
        assert_eq!(row, "| ipvs | 1,000 | the kernel has no ip_vs | | | | | | |\n");
        // Records of kube-proxy have no 99th percentile.
        let visible_ms = Spread { n: 8, min: 55.0, p50: 63.2, p95: 75.0, p99: None, max: 75.0 };
        let measured = SizeFigures {
            start: Some(Start { cold_start_s: 0.83, rss_mb: 19.4, cpu_start_s: 0.07 }),
            change: Some(Change { visible_ms, cpu_ms_per_change: 4.84 }),
            ..SizeFigures::default()
        };
        let row = backend_row("iptables", 1_000, &measured);
        assert_eq!(row, "| iptables | 1,000 | 63 ms | – | 75 ms | 4.8 ms | 0.8 s | 0.07 s | 19 MB |\n");
        assert_eq!(backend_row("none", 2, &SizeFigures::default()).matches('–').count(), 7);
    }

    #[test]
    fn blocks_are_replaced_and_the_rest_is_kept() {
        let page = Page { blocks: BTreeMap::from([("start", "1 s\n".to_owned())]), ..Page::default() };
        let filled = page.fill("a\n<!-- figures: start -->\nold\n<!-- /figures -->\nb\n").unwrap();
        assert_eq!(filled, "a\n<!-- figures: start -->\n\n1 s\n\n<!-- /figures -->\nb\n");
        assert_eq!(page.fill(&filled).unwrap(), filled);
        check_refused("<!-- figures: stop -->\n<!-- /figures -->", "no figures are named \"stop\"");
        check_refused("<!-- figures: start -->\n", "the block start has no end");
        check_refused("no block", "the page has no block for the figures \"start\"");
    }
}
