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

const HEADER: [&str; 9] =
    ["SERVICE", "PORT", "ADDRESS", "ENDPOINTS", "CONN/S", "", "REFUSED/S", "DENIED/S", "EJECTED"];
const ENDPOINT_HEADER: [&str; 5] = ["ENDPOINT", "CONN/S", "", "CONNECTIONS", ""];
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
        Some(it) => draw_endpoints(frame, middle, it, board.endpoints_of(it.port.id)),
        None => {
            shown.select(board.position_in(&rows));
            let rows = rows.into_iter().map(|it| {
                let is_failing = it.rates.refused + it.rates.denied > 0.0 || !it.port.ejected.is_empty();
                let style = if is_failing { Style::new().yellow() } else { Style::new() };
                TableRow::new(cells(it).map(Cell::from)).style(style)
            });
            let widths = [
                Constraint::Fill(3),
                Constraint::Fill(1),
                Constraint::Fill(3),
                Constraint::Length(9),
                Constraint::Length(9),
                Constraint::Length(HISTORY as u16),
                Constraint::Length(9),
                Constraint::Length(8),
                Constraint::Length(7),
            ];
            let table = Table::new(rows, widths).header(TableRow::new(HEADER).bold());
            let table = table.row_highlight_style(Modifier::REVERSED);
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
    let widths = [
        Constraint::Fill(2),
        Constraint::Length(9),
        Constraint::Length(HISTORY as u16),
        Constraint::Length(11),
        Constraint::Fill(1),
    ];
    frame.render_widget(Table::new(rows, widths).header(TableRow::new(ENDPOINT_HEADER).bold()), area);
}

/// The board as lines, each Service with the rates of the last reading; of more than `limit` the number of the others.
pub(super) fn lines(board: &Board, limit: usize) -> String {
    let mut table = comfy_table::Table::new();
    table.set_header(without_plot(HEADER.map(ToOwned::to_owned)));
    let rows = board.rows();
    for it in rows.iter().take(limit) {
        table.add_row(without_plot(cells(it)));
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
            "ejected": port.ejected,
        })
    });
    json!({ "generation": board.generation(), "servicePorts": ports.collect::<Vec<_>>(), "count": rows.len() })
}

fn without_plot(cells: [String; 9]) -> Vec<String> {
    cells.into_iter().enumerate().filter(|(index, _)| *index != 5).map(|(_, it)| it).collect()
}

fn cells(Row { port, rates }: &Row) -> [String; 9] {
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
    ]
}

/// `count` is how many rows there are.
fn title(board: &Board, count: usize) -> String {
    if let Some(Row { port, .. }) = board.opened() {
        let name = format!("{} {}", port.name.service, port.name.port);
        let endpoints = model::counted(board.endpoints_of(port.id).len(), "endpoint");
        return format!("{} at {}: {endpoints}", escaped(name.trim()), port.address);
    }
    if let Some(failure) = board.failure() {
        return format!("cannot be read: {failure}");
    }
    let generation = board.generation().map_or_else(String::new, |it| format!(", generation {it}"));
    let by = board.sort().to_possible_value();
    let by = by.as_ref().map_or("", PossibleValue::get_name);
    let cursor = if board.is_filtering() { "_" } else { "" };
    let filter = match board.filter() {
        "" if !board.is_filtering() => String::new(),
        filter => format!(", with \"{filter}{cursor}\""),
    };
    format!("{} by {by}{filter}{generation}", model::counted(count, "service port"))
}

fn help(board: &Board) -> &'static str {
    if board.is_filtering() {
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
