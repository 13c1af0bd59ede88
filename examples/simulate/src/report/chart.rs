//! Charts as SVG.

use std::fmt::Write;

/// A chart. Marks that are drawn later cover earlier ones.
pub(super) struct Chart {
    title: String,
    unit: &'static str,
    x: Axis,
    y: Axis,
    marks: String,
}

/// A range of values, and its labels.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    from: f64,
    to: f64,
    /// The labelled values.
    ticks: Vec<(f64, String)>,
    /// The unit of the values.
    unit: String,
}

pub(super) const WIDTH: f64 = 460.0;
pub(super) const HEIGHT: f64 = 150.0;
const LEFT: f64 = 54.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 34.0;

impl Axis {
    /// Returns an axis from 0 to the first label at or above `to`.
    pub(super) fn up_to(to: f64) -> Self {
        let step = nice(to.max(1e-9) / 4.0);
        let count = (to / step - 1e-9).ceil().max(1.0);
        Axis::with_ticks(0.0, step * count, step, 1.0, "")
    }

    /// Returns an axis of time from 0 to `to` seconds, in seconds, minutes or hours.
    pub(super) fn time(to: f64) -> Self {
        let (scale, unit) = match to {
            to if to > 4.0 * 3600.0 => (3600.0, "hours"),
            to if to > 300.0 => (60.0, "minutes"),
            _ => (1.0, "seconds"),
        };
        Axis::with_ticks(0.0, to, nice(to / scale / 6.0) * scale, scale, unit)
    }

    /// Returns an axis with one place for each client.
    pub(super) fn clients(count: usize) -> Self {
        let step = nice(count as f64 / 6.0).max(1.0);
        let mut axis = Axis::with_ticks(0.0, count as f64, step, 1.0, "client");
        // Centres the labels beneath the bars.
        let numbers = (0..count).step_by(step as usize);
        axis.ticks = numbers
            .map(|index| (index as f64 + 0.5, (index + 1).to_string()))
            .collect();
        axis
    }

    fn with_ticks(from: f64, to: f64, step: f64, scale: f64, unit: &str) -> Self {
        let count = ((to - from) / step + 1e-9).floor() as usize;
        let ticks = (0..=count).map(|index| from + step * index as f64);
        let ticks = ticks.map(|value| (value, label(value / scale))).collect();
        Axis {
            from,
            to,
            ticks,
            unit: unit.to_owned(),
        }
    }

    fn share(&self, value: f64) -> f64 {
        ((value - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }
}

impl Chart {
    pub(super) fn new(title: impl Into<String>, unit: &'static str, x: Axis, y: Axis) -> Self {
        Chart {
            title: title.into(),
            unit,
            x,
            y,
            marks: String::new(),
        }
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * self.x.share(value)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self.y.share(value)
    }

    fn path(&self, points: &[(f64, f64)]) -> String {
        let point = |(x, y): &(f64, f64)| format!("{:.1},{:.1}", self.x(*x), self.y(*y));
        points.iter().map(point).collect::<Vec<_>>().join(" ")
    }

    /// Fills the area between 0 and `points`.
    pub(super) fn area(mut self, points: &[(f64, f64)], colour: &str) -> Self {
        if let (Some(first), Some(last)) = (points.first(), points.last()) {
            let all = [&[(first.0, 0.0)], points, &[(last.0, 0.0)]].concat();
            let _ = write!(
                self.marks,
                r#"<polygon points="{}" fill="{colour}"/>"#,
                self.path(&all)
            );
        }
        self
    }

    /// Draws a line through `points`.
    pub(super) fn line(mut self, points: &[(f64, f64)], colour: &str) -> Self {
        let path = self.path(points);
        let _ = write!(
            self.marks,
            r#"<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>"#
        );
        self
    }

    /// Draws bars of this width, each from a lower to an upper value.
    pub(super) fn bars(mut self, bars: &[(f64, f64, f64)], width: f64, colour: &str) -> Self {
        for (x, low, high) in bars.iter().filter(|(_, low, high)| high > low) {
            let (left, right) = (self.x(*x), self.x(x + width));
            let (top, bottom) = (self.y(*high), self.y(*low));
            let gap = if right - left > 4.0 { 1.0 } else { 0.0 };
            let _ = write!(
                self.marks,
                r#"<rect x="{:.1}" y="{top:.1}" width="{:.1}" height="{:.1}" fill="{colour}"/>"#,
                left,
                (right - left - gap).max(0.6),
                (bottom - top).max(0.6)
            );
        }
        self
    }

    /// Draws a dashed line at `value`.
    pub(super) fn level(mut self, value: f64) -> Self {
        let (y, right) = (self.y(value), WIDTH - RIGHT);
        let _ = write!(
            self.marks,
            r##"<line x1="{LEFT}" x2="{right}" y1="{y:.1}" y2="{y:.1}" stroke="#333" stroke-dasharray="4 3"/>"##
        );
        self
    }

    /// Returns the chart as SVG.
    pub(super) fn svg(&self) -> String {
        self.svg_with("")
    }

    /// Returns the chart as part of a larger SVG, with its upper left corner at `x` and `y`.
    pub(super) fn svg_at(&self, x: f64, y: f64) -> String {
        self.svg_with(&format!(
            r#" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}""#
        ))
    }

    fn svg_with(&self, place: &str) -> String {
        let mut svg = format!(
            r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}"{place} role="img"><title>{0}</title>"#,
            self.title
        );
        let _ = write!(
            svg,
            r#"<text x="{LEFT}" y="14" class="title">{}</text>"#,
            self.title
        );
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        for (value, text) in &self.y.ticks {
            let y = self.y(*value);
            let _ = write!(
                svg,
                r#"<line x1="{LEFT}" x2="{right}" y1="{y:.1}" y2="{y:.1}" class="grid"/><text x="{}" y="{:.1}" text-anchor="end">{text}</text>"#,
                LEFT - 6.0,
                y + 4.0
            );
        }
        svg += &self.marks;
        for (value, text) in &self.x.ticks {
            let x = self.x(*value);
            let _ = write!(
                svg,
                r#"<text x="{x:.1}" y="{}" text-anchor="middle">{text}</text>"#,
                bottom + 14.0
            );
        }
        let middle = (LEFT + right) / 2.0;
        let _ = write!(
            svg,
            r#"<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" class="axis"/><text x="{middle}" y="{}" text-anchor="middle" class="unit">{}</text><text x="12" y="{}" transform="rotate(-90 12 {})" text-anchor="middle" class="unit">{}</text></svg>"#,
            HEIGHT - 5.0,
            self.x.unit,
            (TOP + bottom) / 2.0,
            (TOP + bottom) / 2.0,
            self.unit
        );
        svg
    }
}

/// Returns the smallest of 1, 2, 5, 10, … that is at least `step`.
fn nice(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let of = |factor: &f64| power * factor;
    [1.0, 2.0, 5.0]
        .iter()
        .map(of)
        .find(|nice| *nice >= step * (1.0 - 1e-9))
        .unwrap_or(power * 10.0)
}

fn label(value: f64) -> String {
    if value >= 1e4 {
        return format!("{:.0}k", value / 1e3);
    }
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_ends_at_a_label() {
        for (to, end, count) in [
            (0.0, 1e-9, 1),
            (1.0, 1.0, 2),
            (13.2, 15.0, 3),
            (4500.0, 6000.0, 3),
            (8.0, 8.0, 4),
        ] {
            let axis = Axis::up_to(to);
            assert!((axis.to - end).abs() <= 1e-9 + end * 1e-9, "{to}: {axis:?}");
            assert!(axis.ticks.len() > count, "{to}: {axis:?}");
        }
        assert_eq!(
            Axis::time(1800.0).ticks.last().unwrap(),
            &(1800.0, "30".to_owned())
        );
        assert_eq!(Axis::clients(3).ticks.len(), 3);
    }
}
