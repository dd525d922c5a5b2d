//! What the turns of a case come to: medians, ratios, a line of a Markdown table and a row of JSON.

use serde_json::{Value, json};

use crate::perf::statistics::Times;

/// What takes turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Horovod,
    /// gradsync, with gradients in memory that all processes of the machine map.
    Shared,
    /// gradsync, with gradients in memory of each process's own.
    Ordinary,
}

impl Side {
    pub(super) const ALL: [Side; 3] = [Side::Horovod, Side::Shared, Side::Ordinary];

    /// The order of a turn: each side is first, second and last as often as the others.
    pub(super) fn in_turn(turn: usize) -> [Side; 3] {
        let mut sides = Self::ALL;
        sides.rotate_left(turn % Self::ALL.len());
        sides
    }

    fn name(self) -> &'static str {
        match self {
            Side::Horovod => "horovod",
            Side::Shared => "shared",
            Side::Ordinary => "ordinary",
        }
    }
}

/// A vector, and the processes that reduce it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) ranks: usize,
    pub(super) dtype: &'static str,
    pub(super) bytes: u64,
}

/// A case, with each turn's median time in microseconds, by side.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Measured {
    pub(super) case: Case,
    times: [Vec<f64>; 3],
    wrong: [u64; 3],
}

/// How many times as fast as Horovod: the median of all turns, the least and the most.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ratio {
    median: f64,
    least: f64,
    most: f64,
}

impl Measured {
    pub(super) fn new(case: Case) -> Self {
        Self { case, times: Default::default(), wrong: [0; 3] }
    }

    /// Takes what a launch of one side found.
    pub(super) fn take(&mut self, side: Side, time_us: f64, wrong: u64) {
        self.times[side as usize].push(time_us);
        self.wrong[side as usize] += wrong;
    }

    pub(super) fn wrong(&self) -> u64 {
        self.wrong.iter().sum()
    }

    fn time(&self, side: Side) -> Option<f64> {
        median(&self.times[side as usize])
    }

    /// Sides are compared inside a turn, during which the machine changes least.
    fn ratio(&self, side: Side) -> Option<Ratio> {
        let [horovod, own] = [Side::Horovod, side].map(|side| &self.times[side as usize]);
        let ratios: Vec<f64> = horovod.iter().zip(own).map(|(horovod, own)| horovod / own).collect();
        let least = ratios.iter().copied().min_by(f64::total_cmp)?;
        let most = ratios.iter().copied().max_by(f64::total_cmp)?;
        Some(Ratio { median: median(&ratios)?, least, most })
    }

    /// A line of the table.
    pub(super) fn line(&self) -> String {
        let Case { ranks, dtype, bytes } = self.case;
        let size = if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) };
        let time = |side| self.time(side).map_or("–".to_owned(), shown_time);
        let ratio = |side| self.ratio(side).map_or("–".to_owned(), shown_ratio);
        let [horovod, shared, ordinary] = Side::ALL.map(time);
        let [by_shared, by_ordinary] = [Side::Shared, Side::Ordinary].map(ratio);
        format!("| {ranks} × {size} | {dtype} | {horovod} | {shared} | {by_shared} | {ordinary} | {by_ordinary} |\n")
    }

    /// A row as the JSON has it.
    pub(super) fn json(&self) -> Value {
        let Case { ranks, dtype, bytes } = self.case;
        let mut row = json!({"operation": "adasum", "ranks": ranks, "dtype": dtype, "size_bytes": bytes, "layers": 1});
        for side in Side::ALL {
            let (times, wrong) = (&self.times[side as usize], self.wrong[side as usize]);
            row[side.name()] = json!({"time_us": self.time(side), "turns_us": times, "wrong": wrong});
        }
        for side in [Side::Shared, Side::Ordinary] {
            let ratio = self.ratio(side);
            let ratio =
                ratio.map(|Ratio { median, least, most }| json!({"median": median, "least": least, "most": most}));
            row[side.name()]["ratio"] = json!(ratio);
        }
        row
    }
}

/// What stands above the lines.
pub(super) fn heading() -> String {
    "| processes | dtype | Horovod | gradsync, shared buffers | times as fast | ordinary buffers | times as fast |\n\
     |---|---|---|---|---|---|---|\n"
        .to_owned()
}

/// As `perf` has it.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    Times::of(values).map(|times| times.median)
}

/// Three digits or more.
fn shown_time(microseconds: f64) -> String {
    match microseconds {
        time if time < 99.95 => format!("{time:.1} µs"),
        time if time < 999.5 => format!("{time:.0} µs"),
        time if time < 9995.0 => format!("{:.2} ms", time / 1e3),
        time if time < 99_950.0 => format!("{:.1} ms", time / 1e3),
        time => format!("{:.0} ms", time / 1e3),
    }
}

fn shown_ratio(Ratio { median, least, most }: Ratio) -> String {
    format!("{median:.1} ({least:.1} … {most:.1})")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: Case = Case { ranks: 4, dtype: "f16", bytes: 64 << 20 };

    /// The machine is twice as slow in the second turn, and the third turn's Horovod is disturbed.
    fn measured() -> Measured {
        let mut measured = Measured::new(CASE);
        for (horovod, shared, ordinary) in
            [(100e3, 25e3, 50e3), (200e3, 50e3, 100e3), (300e3, 25e3, 50e3), (99e3, 25e3, 50e3), (101e3, 25e3, 50e3)]
        {
            let times = [(Side::Horovod, horovod), (Side::Shared, shared), (Side::Ordinary, ordinary)];
            times.into_iter().for_each(|(side, time)| measured.take(side, time, 0));
        }
        measured
    }

    #[test]
    fn ratios_are_those_of_turns() {
        let ratio = |side| measured().ratio(side).expect("turns");
        assert_eq!(ratio(Side::Shared), Ratio { median: 4.0, least: 3.96, most: 12.0 });
        assert_eq!(ratio(Side::Ordinary), Ratio { median: 2.0, least: 1.98, most: 6.0 });
        assert_eq!(measured().time(Side::Horovod), Some(101e3));
        assert_eq!(Measured::new(CASE).ratio(Side::Shared), None);
    }

    #[test]
    fn lines_and_rows_say_the_same() {
        let line = "| 4 × 64 MiB | f16 | 101 ms | 25.0 ms | 4.0 (4.0 … 12.0) | 50.0 ms | 2.0 (2.0 … 6.0) |\n";
        assert_eq!(measured().line(), line);
        let columns = |line: &str| line.matches('|').count();
        assert!(heading().lines().all(|above| columns(above) == columns(line)));
        let row = measured().json();
        assert_eq!((&row["shared"]["time_us"], &row["shared"]["ratio"]["median"]), (&json!(25e3), &json!(4.0)));
        assert_eq!(row["horovod"]["turns_us"].as_array().map(Vec::len), Some(5));
        assert!(row["horovod"]["ratio"].is_null());
        let small = Measured::new(Case { bytes: 64 << 10, ..CASE });
        assert_eq!(small.line(), "| 4 × 64 KiB | f16 | – | – | – | – | – |\n");
    }

    #[test]
    fn times_have_three_digits() {
        let shown = [3.25, 99.96, 999.6, 9996.0, 99_960.0].map(shown_time);
        assert_eq!(shown, ["3.2 µs", "100 µs", "1.00 ms", "10.0 ms", "100 ms"]);
    }

    #[test]
    fn each_side_has_each_place() {
        for place in 0..3 {
            let mut sides: Vec<usize> = (0..3).map(|turn| Side::in_turn(turn)[place] as usize).collect();
            sides.sort_unstable();
            assert_eq!(sides, [0, 1, 2]);
        }
    }

    #[test]
    fn wrong_elements_of_all_launches_count() {
        let mut measured = measured();
        measured.take(Side::Ordinary, 1.0, 3);
        measured.take(Side::Horovod, 1.0, 4);
        assert_eq!((measured.wrong(), &measured.json()["horovod"]["wrong"]), (7, &json!(4)));
    }
}
