//! The facts of all ranks, one line per rank, followed by the problems.

use super::Report;
use super::clock::Offset;
use super::diagnosis::Problem;
use super::exchange::Exchange;
use super::facts::Facts;

const HEADINGS: [&str; 14] = [
    "rank",
    "host",
    "address",
    "process",
    "local",
    "exchange",
    "GPU",
    "NCCL",
    "MPI",
    "threads",
    "clock",
    "descriptors",
    "memory",
    "/dev/shm",
];

pub(super) fn text(report: &Report<'_>) -> String {
    let Report { ranks, clocks, exchanges, problems } = *report;
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    rows.extend(ranks.iter().zip(clocks).zip(exchanges).map(|((rank, clock), exchange)| row(rank, *clock, exchange)));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
    let line = |row: &[String; 14]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect::<Vec<_>>();
        cells.join("  ").trim_end().to_owned()
    };
    let version = ranks.first().map(|rank| format!("gradsync {}, {} ranks", rank.version, ranks.len()));
    let mut lines: Vec<String> = version.into_iter().chain(rows.iter().map(line)).collect();
    for Problem { problem, remedy } in problems {
        lines.push(format!("problem: {problem}\n  remedy: {remedy}"));
    }
    lines.push(match problems.len() {
        0 => "all ranks joined, and no problem was found".into(),
        1 => "all ranks joined, and 1 problem was found".into(),
        count => format!("all ranks joined, and {count} problems were found"),
    });
    lines.join("\n") + "\n"
}

fn row(rank: &Facts, clock: Offset, exchange: &Exchange) -> [String; 14] {
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".into());
    let local = match (rank.local_rank, rank.local_world_size) {
        (Some(local_rank), Some(size)) => format!("{local_rank} of {size}"),
        (Some(local_rank), None) => local_rank.to_string(),
        (None, _) => "unknown".into(),
    };
    let clock = match rank.rank {
        0 => "0".into(),
        _ => format!("{:+.1} ± {:.1} ms", clock.seconds * 1e3, clock.uncertainty * 1e3),
    };
    let mebibytes = |bytes: Option<u64>, none: &str| bytes.map_or(none.into(), |bytes| format!("{} MiB", bytes >> 20));
    [
        rank.rank.to_string(),
        rank.host.clone(),
        rank.address.clone().unwrap_or_else(|| "by MPI".into()),
        rank.pid.to_string(),
        local,
        exchange.word().into(),
        rank.gpu().unwrap_or("none").to_owned(),
        or_none(&rank.nccl),
        rank.mpi.as_deref().map_or_else(|| "none".into(), mpi),
        format!("{} of {}", rank.threads, rank.cores),
        clock,
        rank.descriptors.map_or_else(|| "unlimited".into(), |count| count.to_string()),
        mebibytes(rank.memory_bytes, "unknown"),
        mebibytes(rank.shared_memory_bytes, "none"),
    ]
}

/// Name and version of an MPI library. Implementations add packages, commits and dates behind a comma or after spaces.
fn mpi(library: &str) -> String {
    const LONGEST: usize = 32;
    let first = library.split(',').next().unwrap_or_default().replace("Version:", " ").replace("Library", " ");
    first.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpi_shows_name_and_version() {
        let shown = [
            (
                "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022",
                "Open MPI v4.1.4",
            ),
            ("MPICH Version:      4.0.2", "MPICH 4.0.2"),
            ("Intel(R) MPI Library 2021.11 for Linux* OS", "Intel(R) MPI 2021.11 for Linux* "),
            ("libmpi.so.40", "libmpi.so.40"),
        ];
        shown.iter().for_each(|(library, expected)| assert_eq!(mpi(library), *expected));
    }
}
