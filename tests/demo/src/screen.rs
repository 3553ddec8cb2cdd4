//! The layout of the demo: plain text, bold on a terminal.

use std::{env, fmt::Display, io::IsTerminal as _, time::Duration};

use comfy_table::{CellAlignment, Table, TableComponent, presets::UTF8_HORIZONTAL_ONLY};

pub(crate) fn heading(number: &str, text: &str) {
    let (bold, plain) = if is_styled() { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
    println!("\n{bold}{number}  {text}{plain}\n");
}

pub(crate) fn line(text: &str) {
    println!("   {text}");
}

/// A table of a phase; `right` are the columns with numbers.
pub(crate) fn table(columns: &[&str], right: &[usize], rows: &[Vec<String>]) {
    let mut table = Table::new();
    // Without lines between rows.
    table.load_preset(UTF8_HORIZONTAL_ONLY);
    table.remove_style(TableComponent::HorizontalLines).remove_style(TableComponent::MiddleIntersections);
    table.set_header(columns.iter());
    for row in rows {
        table.add_row(row);
    }
    for &index in right {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for text in table.lines() {
        println!("   {}", text.trim_end());
    }
    println!();
}

/// 12345 as `12,345`.
pub(crate) fn number(value: impl Display) -> String {
    build_tools::grouped(&value.to_string())
}

pub(crate) fn duration(value: Duration) -> String {
    let micros = value.as_secs_f64() * 1e6;
    match micros {
        0.0..1_000.0 => format!("{micros:.0} µs"),
        1_000.0..100_000.0 => format!("{:.1} ms", micros / 1e3),
        100_000.0..1_000_000.0 => format!("{:.0} ms", micros / 1e3),
        _ => format!("{:.1} s", micros / 1e6),
    }
}

/// A part of a whole in percent.
pub(crate) fn share(part: usize, whole: usize) -> String {
    let rounded = (part * 200 + whole) / (whole * 2).max(1);
    format!("{rounded} %")
}

fn is_styled() -> bool {
    std::io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_for_people() {
        assert_eq!([number(7), number(1234), number(1_234_567)], ["7", "1,234", "1,234,567"]);
        assert_eq!(duration(Duration::from_nanos(52_400)), "52 µs");
        assert_eq!(duration(Duration::from_micros(3_240)), "3.2 ms");
        assert_eq!([share(1, 3), share(2, 3), share(0, 0)], ["33 %", "67 %", "0 %"]);
    }
}
