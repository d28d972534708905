//! A figure of what several carry, one upon the other, over time.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 30.0;
/// Told apart also without colours: from dark to light.
const COLOURS: [&str; 5] = ["#2b4c6f", "#4c8c6b", "#c9923e", "#d9c7a0", "#8a5a6b"];

/// What to draw.
pub struct Timeline<'a> {
    /// Who they are.
    pub names: &'a [&'a str],
    /// What is counted, for the reader.
    pub unit: &'a str,
    /// How much of it each carries, at times that are the same for all.
    pub rates: &'a [Vec<f64>],
    /// Seconds between two of them.
    pub step_s: f64,
    /// What happened, and when, in seconds.
    pub changes: &'a [(f64, String)],
}

impl Timeline<'_> {
    /// As SVG.
    pub fn svg(&self) -> String {
        let steps = self.rates.iter().map(Vec::len).min().unwrap_or_default();
        let sum = |at: usize| self.rates.iter().map(|rates| rates[at]).sum::<f64>();
        let most = (0..steps).map(sum).fold(1.0, f64::max) * 1.05;
        let seconds = steps as f64 * self.step_s;
        let x = |second: f64| LEFT + second / seconds.max(self.step_s) * WIDTH;
        let y = |rate: f64| TOP + HEIGHT - rate / most * HEIGHT;
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0}\" height=\"{:.0}\" font-family=\"sans-serif\" \
             font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
            LEFT + WIDTH + 20.0,
            TOP + HEIGHT + 70.0
        );
        let mut below = vec![0.0; steps];
        for (who, rates) in self.rates.iter().enumerate() {
            let above: Vec<f64> = below.iter().zip(rates).map(|(below, rate)| below + rate).collect();
            let point = |(at, rate): (usize, &f64)| format!("{:.1},{:.1}", x(at as f64 * self.step_s), y(*rate));
            let there = above.iter().enumerate().map(point);
            let back = below.iter().enumerate().rev().map(point);
            let points: Vec<String> = there.chain(back).collect();
            let colour = COLOURS[who % COLOURS.len()];
            // Writing into a string cannot fail.
            let _ = writeln!(text, "<polygon fill=\"{colour}\" points=\"{}\"/>", points.join(" "));
            let at = LEFT + who as f64 * 90.0;
            let legend = TOP + HEIGHT + 45.0;
            let _ = writeln!(
                text,
                "<rect x=\"{at}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>",
                legend - 11.0
            );
            let _ = writeln!(text, "<text x=\"{}\" y=\"{legend}\">{}</text>", at + 18.0, self.names[who]);
            below = above;
        }
        for (second, what) in self.changes {
            let (at, bottom) = (x(*second), TOP + HEIGHT);
            let _ = writeln!(
                text,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" stroke=\"#222222\" \
                 stroke-dasharray=\"4 3\"/>"
            );
            let _ = writeln!(text, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{what}</text>", TOP - 8.0);
        }
        for part in 0..=4 {
            let (rate, second) = (most * f64::from(part) / 4.0, seconds * f64::from(part) / 4.0);
            let _ = writeln!(
                text,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{rate:.0}</text>",
                LEFT - 6.0,
                y(rate) + 4.0
            );
            let _ = writeln!(
                text,
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{second:.0} s</text>",
                x(second),
                TOP + HEIGHT + 18.0
            );
        }
        let _ = writeln!(text, "<text x=\"{}\" y=\"{}\">{}</text>", LEFT + 400.0, TOP + HEIGHT + 45.0, self.unit);
        text.push_str("</svg>\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_and_every_change_is_drawn() {
        let rates = [vec![100.0, 50.0, 0.0], vec![100.0, 100.0, 200.0]];
        let changes = [(0.1, "one leaves".to_owned())];
        let svg =
            Timeline { names: &["one", "two"], unit: "SETs per second", rates: &rates, step_s: 0.1, changes: &changes }
                .svg();
        assert_eq!(svg.matches("<polygon").count(), 2);
        assert!(svg.contains("one leaves") && svg.contains(">two<") && svg.ends_with("</svg>\n"), "{svg}");
        let empty = Timeline { names: &[], unit: "", rates: &[], step_s: 0.1, changes: &[] }.svg();
        assert!(!empty.contains("NaN"), "{empty}");
    }
}
