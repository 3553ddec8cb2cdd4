//! Figures next to their goals, as data: they are printed, and recorded for the documents.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, bail};
use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};

use crate::proxy_figures::{self, ProxyFigures};

pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Any percentile of at least one figure.
pub(crate) fn percentiles(mut figures: Vec<f64>) -> impl Fn(usize) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    move |percent| figures[((figures.len() - 1) * percent + 50) / 100]
}

/// The median of at least one figure.
pub(crate) fn median(figures: Vec<f64>) -> f64 {
    percentiles(figures)(50)
}

/// The medians of figures that are measured in turns, so many times each: what else the machine does affects all of them.
/// Every round has the same order.
pub(crate) fn medians_in_order<const N: usize>(
    rounds: usize,
    measure: impl FnMut(usize) -> Result<f64>,
) -> Result<[f64; N]> {
    medians(rounds, 0, measure)
}

/// Like [`medians_in_order`], but each round begins with the next figure.
pub(crate) fn medians_in_rotation<const N: usize>(
    rounds: usize,
    measure: impl FnMut(usize) -> Result<f64>,
) -> Result<[f64; N]> {
    medians(rounds, 1, measure)
}

fn medians<const N: usize>(
    rounds: usize,
    step: usize,
    mut measure: impl FnMut(usize) -> Result<f64>,
) -> Result<[f64; N]> {
    let mut figures = [const { Vec::new() }; N];
    for round in 0..rounds {
        for which in (0..N).map(|it| (it + round * step) % N) {
            figures[which].push(measure(which)?);
        }
    }
    Ok(figures.map(median))
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Figures {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    header: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) rows: Vec<Row>,
    /// What plots show, where rows would be too many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    series: Vec<Series>,
    /// What was measured, and how.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) method: String,
    /// The figures of proxies, which are compared by tables of their own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) proxies: ProxyFigures,
    /// The versions of other proxies; a record has them beside the figures.
    #[serde(skip)]
    pub(crate) versions: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Rows that begin with spaces belong to the one above.
    pub(crate) case: String,
    /// The figure must not be above it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) goal: Option<f64>,
    pub(crate) measured: f64,
    pub(crate) unit: String,
    digits: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

impl Row {
    pub(crate) fn is_missed(&self) -> bool {
        self.goal.is_some_and(|it| self.measured > it)
    }

    /// The figure with its unit.
    pub(crate) fn text(&self) -> String {
        let Self { measured, digits, unit, .. } = self;
        format!("{measured:.digits$} {unit}").trim_end().to_owned()
    }

    pub(crate) fn goal_text(&self) -> String {
        self.goal.map_or_else(String::new, |it| format!("<= {it} {}", self.unit).trim_end().to_owned())
    }
}

impl Figures {
    pub(crate) fn new(header: &str) -> Self {
        Self { header: header.to_owned(), ..Self::default() }
    }

    /// Adds a figure that must not be above `goal`.
    pub(crate) fn row(&mut self, case: &str, goal: f64, measured: f64, unit: &str, digits: usize) {
        self.add(case, Some(goal), measured, unit, digits);
    }

    /// Adds a figure without a goal.
    pub(crate) fn figure(&mut self, case: &str, measured: f64, unit: &str, digits: usize) {
        self.add(case, None, measured, unit, digits);
    }

    fn add(&mut self, case: &str, goal: Option<f64>, measured: f64, unit: &str, digits: usize) {
        let (case, unit) = (case.to_owned(), unit.to_owned());
        self.rows.push(Row { case, goal, measured, unit, digits });
    }

    pub(crate) fn series(&mut self, name: &str, points: Vec<(f64, f64)>) {
        self.series.push(Series { name: name.to_owned(), points });
    }

    pub(crate) fn method(mut self, text: impl Into<String>) -> Self {
        self.method = text.into();
        self
    }

    /// The points of a line; none if it was not measured.
    pub(crate) fn points(&self, name: &str) -> &[(f64, f64)] {
        self.series.iter().find(|it| it.name == name).map_or(&[], |it| &it.points)
    }

    /// Prints them as a table below the method.
    pub(crate) fn print(&self) {
        if !self.proxies.is_empty() {
            println!("\n{}\n", self.method);
            return proxy_figures::print(&self.proxies);
        }
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        table.set_header([&self.header, "GOAL", "MEASURED", ""]);
        for row in &self.rows {
            let verdict = match (row.goal, row.is_missed()) {
                (None, _) => "",
                (_, true) => "MISSED",
                (_, false) => "ok",
            };
            table.add_row([&row.case, &row.goal_text(), &row.text(), verdict]);
        }
        println!("\n{}\n\n{}", self.method, table.trim_fmt());
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self.rows.iter().filter(|it| it.is_missed()).count() {
            0 => Ok(()),
            missed => bail!("{missed} goals were missed; is the machine busy?"),
        }
    }
}
