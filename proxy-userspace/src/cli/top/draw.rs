//! The board on a screen, and as lines.

use admin::History;
use clap::{ValueEnum as _, builder::PossibleValue};
use model::escaped;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Modifier, Style, Stylize as _},
    text::Line,
    widgets::{Cell, Paragraph, Row as TableRow, Table, TableState},
};
use serde_json::{Value, json};

use super::{
    board::{Board, Row},
    sample::{Endpoint, HISTORY},
};
use crate::cli::output;

/// The columns with their widths. Rows have as many cells, and [`shown_in`] leaves out what a board has nothing for.
const COLUMNS: [(&str, Constraint); 10] = [
    ("SERVICE", Constraint::Fill(3)),
    ("PORT", Constraint::Fill(1)),
    ("ADDRESS", Constraint::Fill(3)),
    ("ENDPOINTS", Constraint::Length(9)),
    ("CONN/S", Constraint::Length(9)),
    ("", Constraint::Length(HISTORY as u16)),
    ("REFUSED/S", Constraint::Length(9)),
    ("DENIED/S", Constraint::Length(8)),
    ("EJECTED", Constraint::Length(7)),
    ("FORWARDED/S", Constraint::Length(11)),
];
const PLOTTED: usize = 5;
/// The column of packets that are forwarded whole.
const FORWARDED: usize = 9;
const ENDPOINT_COLUMNS: [(&str, Constraint); 5] = [
    ("ENDPOINT", Constraint::Fill(2)),
    ("CONN/S", Constraint::Length(9)),
    ("", Constraint::Length(HISTORY as u16)),
    ("CONNECTIONS", Constraint::Length(11)),
    ("", Constraint::Fill(1)),
];
/// The smallest screen that the board fits on.
const MIN: (u16, u16) = (50, 5);
const PLOT: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Draws the board; `shown` remembers which rows are on the screen.
pub(super) fn draw(frame: &mut Frame<'_>, board: &Board, shown: &mut TableState) {
    let area = frame.area();
    if area.width < MIN.0 || area.height < MIN.1 {
        let text = format!("{} x {} is too small, {} x {} is needed", area.width, area.height, MIN.0, MIN.1);
        return frame.render_widget(Paragraph::new(text), area);
    }
    let [top, middle, bottom] =
        Layout::vertical([Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)]).areas(area);
    let opened = board.opened();
    let rows = if opened.is_some() { Vec::new() } else { board.rows() };
    frame.render_widget(Line::from(title(board, rows.len())).bold(), top);
    frame.render_widget(Line::from(help(board)).dim(), bottom);
    match opened {
        Some(it) => draw_endpoints(frame, middle, it, board.endpoints_of(it.port.id).unwrap_or_default()),
        None => {
            shown.select(board.position_in(&rows));
            let rows = rows.into_iter().map(|it| {
                let is_failing = it.rates.refused + it.rates.denied > 0.0 || !it.port.ejected.is_empty();
                let style = if is_failing { Style::new().yellow() } else { Style::new() };
                TableRow::new(shown_in(board, cells(it)).map(Cell::from)).style(style)
            });
            let table = table(rows, shown_in(board, COLUMNS)).row_highlight_style(Modifier::REVERSED);
            frame.render_stateful_widget(table, middle, shown);
        }
    }
}

fn draw_endpoints(frame: &mut Frame<'_>, area: Rect, row: &Row, endpoints: &[Endpoint]) {
    let rows = endpoints.iter().map(|Endpoint { address, connections, rates }| {
        let is_ejected = row.port.ejected.contains(address);
        TableRow::new([
            address.to_string(),
            rate(rates.now()),
            plot(rates),
            connections.to_string(),
            if is_ejected { "ejected for some clients" } else { "" }.to_owned(),
        ])
        .style(if is_ejected { Style::new().yellow() } else { Style::new() })
    });
    frame.render_widget(table(rows, ENDPOINT_COLUMNS.into_iter()), area);
}

fn table<'a>(
    rows: impl Iterator<Item = TableRow<'a>>,
    columns: impl Iterator<Item = (&'static str, Constraint)>,
) -> Table<'a> {
    let (header, widths): (Vec<_>, Vec<_>) = columns.unzip();
    Table::new(rows, widths).header(TableRow::new(header).bold())
}

/// The board as lines, each Service with the rates of the last reading; of more than `limit` the number of the others.
pub(super) fn lines(board: &Board, limit: usize) -> String {
    let mut table = comfy_table::Table::new();
    table.set_header(without_plot(board, COLUMNS.map(|(name, _)| name.to_owned())));
    let rows = board.rows();
    for it in rows.iter().take(limit) {
        table.add_row(without_plot(board, cells(it)));
    }
    let mut text = output::lines(&mut table);
    if let Some(others @ 1..) = rows.len().checked_sub(limit) {
        text += &format!("and {others} more service ports: --limit shows more, --filter and --sort others\n");
    }
    text
}

/// The same as one object.
pub(super) fn json(board: &Board, limit: usize) -> Value {
    let rows = board.rows();
    let ports = rows.iter().take(limit).map(|Row { port, rates }| {
        json!({
            "service": Some(&*port.name.service).filter(|it| !it.is_empty()),
            "port": &*port.name.port,
            "address": port.address,
            "endpoints": port.endpoint_count,
            "connectionsPerSecond": rates.connections.now(),
            "refusedPerSecond": rates.refused,
            "deniedPerSecond": rates.denied,
            "forwardedPacketsPerSecond": rates.forwarded,
            "ejected": port.ejected,
        })
    });
    json!({ "generation": board.generation(), "servicePorts": ports.collect::<Vec<_>>(), "count": rows.len() })
}

/// The columns that a board shows: packets only if some are, or were, forwarded.
fn shown_in<T>(board: &Board, columns: [T; 10]) -> impl Iterator<Item = T> {
    let count = if board.has_forwarded { columns.len() } else { FORWARDED };
    columns.into_iter().take(count)
}

fn without_plot(board: &Board, cells: [String; 10]) -> Vec<String> {
    shown_in(board, cells).enumerate().filter(|(index, _)| *index != PLOTTED).map(|(_, it)| it).collect()
}

fn cells(Row { port, rates }: &Row) -> [String; 10] {
    let service = if port.name.service.is_empty() { "?" } else { &port.name.service };
    [
        escaped(service).to_string(),
        escaped(&port.name.port).to_string(),
        port.address.clone(),
        port.endpoint_count.to_string(),
        rate(rates.connections.now()),
        plot(&rates.connections),
        rate(rates.refused),
        rate(rates.denied),
        if port.ejected.is_empty() { String::new() } else { port.ejected.len().to_string() },
        rate(rates.forwarded),
    ]
}

/// `count` is how many rows there are.
fn title(board: &Board, count: usize) -> String {
    if let Some(Row { port, .. }) = board.opened() {
        let name = format!("{} {}", port.name.service, port.name.port);
        let endpoints = board.endpoints_of(port.id).unwrap_or_default();
        let endpoints = model::counted(endpoints.len(), "endpoint");
        return format!("{} at {}: {endpoints}", escaped(name.trim()), port.address);
    }
    if let Some(failure) = &board.failure {
        return format!("cannot be read: {failure}");
    }
    let generation = board.generation().map_or_else(String::new, |it| format!(", generation {it}"));
    let by = board.sort.to_possible_value();
    let by = by.as_ref().map_or("", PossibleValue::get_name);
    let cursor = if board.is_filtering { "_" } else { "" };
    let filter = match board.filter.as_str() {
        "" if !board.is_filtering => String::new(),
        filter => format!(", with \"{filter}{cursor}\""),
    };
    format!("{} by {by}{filter}{generation}", model::counted(count, "service port"))
}

fn help(board: &Board) -> &'static str {
    if board.is_filtering {
        "Enter done  Esc no filter"
    } else if board.opened().is_some() {
        "Esc back  q quit"
    } else {
        "arrows select  Enter endpoints  / filter  sort by c connections r refused d denied e ejected n name  q quit"
    }
}

/// A rate with three digits or more; nothing for zero.
fn rate(rate: f64) -> String {
    match rate {
        0.0 => String::new(),
        0.0..10.0 => format!("{rate:.1}"),
        _ => format!("{rate:.0}"),
    }
}

/// The rates as bars, the highest of them as a full one.
fn plot(history: &History<HISTORY>) -> String {
    let highest = history.iter().fold(0.0, f64::max);
    let bar = |rate: f64| match rate {
        0.0 => PLOT[0],
        rate => PLOT[((rate / highest * 8.0).ceil() as usize).clamp(1, 8)],
    };
    history.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use datapath::{ForwardCounts, PacketCount, PortCounts};

    use super::*;
    use crate::cli::top::{
        board::{
            SortBy,
            tests::{port, read},
        },
        sample::PortSample,
    };

    /// A second with packets of a Service: sent on, and served or received.
    fn board(sent: u64, others: u64) -> Board {
        let mut board = Board::new(SortBy::Name, String::new());
        for second in [0, 1] {
            let count = |packets| PacketCount { packets: packets * second, bytes: 0 };
            let forwarding = ForwardCounts {
                sent: count(sent),
                served: count(others),
                received: count(others),
                ..ForwardCounts::default()
            };
            let counts = PortCounts { forwarding, ..PortCounts::default() };
            read(&mut board, 1, vec![PortSample { counts, ..port(1, "default/web", 0, 0) }]);
        }
        board
    }

    #[test]
    fn packets_have_a_column_where_some_are_forwarded() {
        let forwarding = board(10, 5);
        let text = lines(&forwarding, 20);
        let [header, row] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
        assert!(header.ends_with("FORWARDED/S") && row.ends_with(" 20"), "{text}");
        assert_eq!(json(&forwarding, 20)["servicePorts"][0]["forwardedPacketsPerSecond"], 20.0);
        assert!(!lines(&board(0, 0), 20).contains("FORWARDED"));
    }
}
