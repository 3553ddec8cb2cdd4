//! Figures next to their goals.

use anyhow::{Result, bail};
use comfy_table::{Table, presets};

/// The header of most reports.
pub(crate) const TEN_EACH: &str = "CASE, 10 ENDPOINTS EACH";

/// A table of figures.
pub(crate) struct FigureTable {
    table: Table,
    missed: usize,
}

impl FigureTable {
    pub(crate) fn new(header: &str) -> Self {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        table.set_header([header, "GOAL", "MEASURED", ""]);
        Self { table, missed: 0 }
    }

    /// Adds a figure that must not be above `goal`.
    pub(crate) fn row(&mut self, case: &str, goal: f64, measured: f64, unit: &str, digits: usize) {
        let is_met = measured <= goal;
        self.missed += usize::from(!is_met);
        self.table.add_row([
            case.to_owned(),
            format!("<= {goal} {unit}"),
            format!("{measured:.digits$} {unit}"),
            if is_met { "ok" } else { "MISSED" }.to_owned(),
        ]);
    }

    /// Adds a figure without a goal.
    pub(crate) fn figure(&mut self, case: &str, measured: f64, unit: &str, digits: usize) {
        self.table.add_row([case, "", &format!("{measured:.digits$} {unit}"), ""]);
    }

    /// Prints the table below its title; fails if a goal was missed.
    pub(crate) fn print(&self, title: &str) -> Result<()> {
        println!("\n{title}\n\n{}", self.table.trim_fmt());
        match self.missed {
            0 => Ok(()),
            missed => bail!("{missed} goals were missed; is the machine busy?"),
        }
    }
}
