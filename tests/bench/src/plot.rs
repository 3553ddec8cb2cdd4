//! Plots as SVG, readable on light and dark pages.
//! Invariant: the same figures give the same bytes.

use std::{fmt::Write as _, ops::Range};

use anyhow::{Result, anyhow};
use build_tools::grouped;
use plotters::{
    chart::{ChartBuilder, SeriesLabelPosition},
    coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter},
    drawing::IntoDrawingArea as _,
    element::{Circle, PathElement},
    prelude::SVGBackend,
    series::{DashedLineSeries, LineSeries},
    style::{Color as _, IntoFont as _, RGBColor, ShapeStyle, TextStyle},
};

const SIZE: (u32, u32) = (800, 420);

/// A color on light pages, and on dark ones.
type Shade = [RGBColor; 2];

const BACKGROUND: Shade = [RGBColor(0xFF, 0xFF, 0xFF), RGBColor(0x0D, 0x11, 0x17)];
const TEXT: Shade = [RGBColor(0x1F, 0x23, 0x28), RGBColor(0xE6, 0xED, 0xF3)];
const GRID: Shade = [RGBColor(0xD8, 0xDE, 0xE4), RGBColor(0x30, 0x36, 0x3D)];
const LINES: [Shade; 6] = [
    [RGBColor(0x09, 0x69, 0xDA), RGBColor(0x58, 0xA6, 0xFF)],
    [RGBColor(0x1A, 0x7F, 0x37), RGBColor(0x3F, 0xB9, 0x50)],
    [RGBColor(0xBC, 0x4C, 0x00), RGBColor(0xF0, 0x88, 0x3E)],
    [RGBColor(0x82, 0x50, 0xDF), RGBColor(0xBC, 0x8C, 0xFF)],
    [RGBColor(0xBF, 0x39, 0x89), RGBColor(0xF7, 0x78, 0xBA)],
    [RGBColor(0x6E, 0x77, 0x81), RGBColor(0x9E, 0xA7, 0xB1)],
];

#[derive(Clone, Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    /// What the horizontal axis shows, which is logarithmic.
    pub(crate) x_title: &'static str,
    pub(crate) y_scale: Scale,
    pub(crate) y_unit: Unit,
    pub(crate) lines: Vec<Line>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    /// It begins at zero, or below.
    Linear,
    /// A tick for every decade; on the horizontal axis, for every value.
    Logarithmic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// As µs, ms or s.
    Milliseconds,
    Microseconds,
    Nanoseconds,
    Megabytes,
}

/// The points of a line, from left to right.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// Its place in the palette.
    pub(crate) color: usize,
    pub(crate) is_dashed: bool,
}

impl Unit {
    fn text(self, value: f64) -> String {
        match self {
            Self::Milliseconds if value >= 999.9 => format!("{} s", number(value / 1e3)),
            Self::Milliseconds if value != 0.0 && value < 0.999 => format!("{} µs", number(value * 1e3)),
            Self::Milliseconds => format!("{} ms", number(value)),
            Self::Microseconds => format!("{} µs", number(value)),
            Self::Nanoseconds => format!("{} ns", number(value)),
            Self::Megabytes => format!("{} MB", number(value)),
        }
    }
}

/// A number with at most two decimals and with separators of thousands.
pub(crate) fn number(value: f64) -> String {
    let text = format!("{:.2}", value.abs());
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, fraction) = text.split_at(text.find('.').unwrap_or(text.len()));
    let sign = if value < 0.0 && text != "0" { "−" } else { "" };
    format!("{sign}{}{fraction}", grouped(whole))
}

struct Axis {
    scale: Scale,
    unit: Option<Unit>,
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Axis {
    /// The axis of some values, with ticks at round ones; without a unit it is the horizontal one.
    fn of(scale: Scale, unit: Option<Unit>, values: &[f64]) -> Self {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (range, ticks) = match (scale, unit) {
            (Scale::Logarithmic, None) => (least * 0.85..most * 1.18, values.to_vec()),
            (Scale::Logarithmic, Some(_)) => {
                let [first, last] = [(least * 0.9).log10().floor(), (most * 1.1).log10().ceil()];
                let ticks = (first as i32..=last as i32).map(|it| 10_f64.powi(it)).collect::<Vec<_>>();
                (10_f64.powf(first)..10_f64.powf(last), ticks)
            }
            (Scale::Linear, _) => {
                let least = least.min(0.0);
                let step = step((most - least) / 7.0);
                let [first, last] = [(least / step).floor(), (most / step).ceil()];
                let ticks = (first as i32..=last as i32).map(|it| f64::from(it) * step).collect();
                // The names of the lines are above them.
                (first * step..last * step * 1.3, ticks)
            }
        };
        let mut ticks: Vec<f64> = ticks;
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        Self { scale, unit, range, ticks }
    }

    fn position(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value,
            Scale::Logarithmic => value.log10(),
        }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        let [begin, end, it] = [self.range.start, self.range.end, *value].map(|it| self.position(it));
        first + (f64::from(last - first) * (it - begin) / (end - begin)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format(value: &f64) -> String {
        number(*value)
    }

    fn format_ext(&self, value: &f64) -> String {
        self.unit.map_or_else(|| number(*value), |it| it.text(*value))
    }
}

/// The next larger of 1, 2 and 5 times a power of ten.
fn step(at_least: f64) -> f64 {
    let power = 10_f64.powf(at_least.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|it| it * power).find(|it| *it >= at_least).unwrap_or(10.0 * power)
}

impl Plot {
    pub(crate) fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|error| anyhow!("cannot draw {:?}: {error}", self.title))?;
        Ok(with_schemes(&svg))
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error + '_>> {
        let all = || self.lines.iter().flat_map(|it| &it.points);
        let xs: Vec<f64> = all().map(|it| it.0).collect();
        let ys: Vec<f64> = all().map(|it| it.1).collect();
        let text = |size: u32| TextStyle::from(("sans-serif", size).into_font()).color(&TEXT[0]);
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&BACKGROUND[0]).map_err(|it| it.to_string())?;
        let mut chart = ChartBuilder::on(&area)
            .caption(&self.title, text(17))
            .margin(12)
            .margin_right(28)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(
                Axis::of(Scale::Logarithmic, None, &xs),
                Axis::of(self.y_scale, Some(self.y_unit), &ys),
            )
            .map_err(|it| it.to_string())?;
        chart
            .configure_mesh()
            .bold_line_style(GRID[0])
            .light_line_style(BACKGROUND[0])
            .axis_style(GRID[0])
            .label_style(text(13))
            .axis_desc_style(text(13))
            .x_desc(self.x_title)
            .draw()
            .map_err(|it| it.to_string())?;
        for line in &self.lines {
            let color = LINES[line.color % LINES.len()][0];
            let style = ShapeStyle { color: color.to_rgba(), filled: true, stroke_width: 2 };
            let points = line.points.clone();
            let dash = line.is_dashed;
            let series = if dash {
                chart.draw_series(DashedLineSeries::new(points.iter().copied(), 6, 4, style))
            } else {
                chart.draw_series(LineSeries::new(points.iter().copied(), style))
            };
            series.map_err(|it| it.to_string())?.label(&line.name).legend(move |(x, y)| {
                let end = if dash { x + 12 } else { x + 24 };
                PathElement::new(vec![(x, y), (end, y)], style)
            });
            let dots = points.into_iter().map(|it| Circle::new(it, 4, style));
            chart.draw_series(dots).map_err(|it| it.to_string())?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .legend_area_size(32)
            .margin(10)
            .background_style(BACKGROUND[0])
            .border_style(GRID[0])
            .label_font(text(13))
            .draw()
            .map_err(|it| it.to_string())?;
        area.present().map_err(|it| it.to_string())?;
        Ok(())
    }
}

/// Adds the colors of dark pages: a style sheet wins over the attributes of elements.
fn with_schemes(svg: &str) -> String {
    let mut style = String::from("<style>@media (prefers-color-scheme: dark) {\n");
    for [light, dark] in [BACKGROUND, TEXT, GRID].iter().chain(&LINES) {
        let [light, dark] = [light, dark].map(|it| format!("#{:02X}{:02X}{:02X}", it.0, it.1, it.2));
        for attribute in ["fill", "stroke"] {
            let _ = writeln!(style, "[{attribute}=\"{light}\"] {{ {attribute}: {dark} }}");
        }
    }
    style += "}</style>\n";
    let start = svg.find('\n').map_or(0, |it| it + 1);
    format!("{}{style}{}", &svg[..start], &svg[start..])
}
