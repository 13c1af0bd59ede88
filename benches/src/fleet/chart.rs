//! The chart: what a grant costs the server, by contender, as bars on logarithmic scales. One SVG,
//! legible in light and in dark.

use std::fmt::Write;

use super::figures::{Figures, digits};
use super::task::Task;

/// A panel of the chart.
struct Panel {
    title: &'static str,
    figure: fn(&Figures) -> f64,
    /// The start of its scale, as a power of ten.
    from: i32,
}

const PANELS: [Panel; 2] = [
    Panel {
        title: "store calls per grant",
        figure: |figures| figures.calls,
        from: -3,
    },
    Panel {
        title: "CPU of Redis per grant, in microseconds",
        figure: |figures| figures.redis,
        from: 0,
    },
];

const WIDTH: f64 = 840.0;
/// Where names end and bars begin, and where a scale ends; figures are to the right of it.
const LEFT: f64 = 250.0;
const RIGHT: f64 = 770.0;
const BAR: f64 = 18.0;
const STEP: f64 = 28.0;
const PANEL_TOP: f64 = 74.0;

/// Draws the chart.
pub(crate) fn svg(tasks: &[Task], measured: &[Figures]) -> String {
    let panel_height = 72.0 + STEP * tasks.len() as f64;
    let height = PANEL_TOP + panel_height * PANELS.len() as f64 + 12.0;
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="What a grant costs Redis, by limiter">
<style>{STYLE}</style>
<rect class="paper" x="0.5" y="0.5" width="{}" height="{}" rx="8"/>
<text class="title" x="24" y="34">What a grant costs Redis</text>
<text class="faint" x="24" y="54">4 processes of 64 callers, always asking, behind one limit of 1000 a second. Logarithmic; shorter is cheaper.</text>
"#,
        WIDTH - 1.0,
        height - 1.0,
    );
    for (number, panel) in PANELS.iter().enumerate() {
        let top = PANEL_TOP + panel_height * number as f64;
        // Writing to a string cannot fail.
        let _ = panel.draw(&mut svg, top, tasks, measured);
    }
    svg.push_str("</svg>\n");
    svg
}

impl Panel {
    fn draw(
        &self,
        svg: &mut String,
        top: f64,
        tasks: &[Task],
        measured: &[Figures],
    ) -> std::fmt::Result {
        let (first, last) = (top + 28.0, top + 28.0 + STEP * tasks.len() as f64);
        let largest = measured.iter().map(self.figure).fold(1.0, f64::max);
        let to = largest.log10().ceil() as i32;
        let x = |value: f64| {
            let share = (value.log10() - f64::from(self.from)) / f64::from(to - self.from);
            LEFT + (RIGHT - LEFT) * share.clamp(0.0, 1.0)
        };
        writeln!(
            svg,
            r#"<text class="head" x="24" y="{}">{}</text>"#,
            top + 16.0,
            self.title
        )?;
        for power in self.from..=to {
            let x = x(10f64.powi(power));
            let label = if power < 0 {
                format!("{:.*}", power.unsigned_abs() as usize, 10f64.powi(power))
            } else {
                10u64.pow(power.unsigned_abs()).to_string()
            };
            writeln!(
                svg,
                r#"<line class="grid" x1="{x:.1}" y1="{first}" x2="{x:.1}" y2="{last}"/>"#
            )?;
            writeln!(
                svg,
                r#"<text class="faint mid" x="{x:.1}" y="{}">{label}</text>"#,
                last + 16.0
            )?;
        }
        for (number, (task, figures)) in tasks.iter().zip(measured).enumerate() {
            let (y, value) = (
                first + STEP * number as f64 + (STEP - BAR) / 2.0,
                (self.figure)(figures),
            );
            let (name, end) = (
                task.contender.name().replace('`', ""),
                x(value).max(LEFT + 2.0),
            );
            // tollgate comes first.
            let class = if number == 0 { "ours" } else { "theirs" };
            let text = y + BAR - 4.5;
            writeln!(
                svg,
                r#"<text class="name" x="{}" y="{text}">{name}</text>"#,
                LEFT - 10.0
            )?;
            writeln!(
                svg,
                r#"<rect class="{class}" x="{LEFT}" y="{y}" width="{:.1}" height="{BAR}" rx="2"/>"#,
                end - LEFT
            )?;
            writeln!(
                svg,
                r#"<text class="value" x="{:.1}" y="{text}">{}</text>"#,
                end + 6.0,
                digits(value)
            )?;
        }
        Ok(())
    }
}

const STYLE: &str = "
text { font: 13px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 18px; font-weight: 600 } .head { font-weight: 600 }
.name { text-anchor: end } .mid { text-anchor: middle } .faint { fill: #59636e; font-size: 12px }
.paper { fill: #ffffff; stroke: #d1d9e0 } .grid { stroke: #d1d9e0 } .ours { fill: #1a7f37 } .theirs { fill: #9198a1 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .faint { fill: #9198a1 } .paper { fill: #0d1117; stroke: #3d444d } .grid { stroke: #3d444d }
.ours { fill: #3fb950 } .theirs { fill: #656c76 }
}
";
