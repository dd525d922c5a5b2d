//! The facts of all ranks: what they share, then one line per rank, followed by the problems.

use gradsync_cli::text::wrapped;

use super::Report;
use super::clock::Offset;
use super::diagnosis::Problem;
use super::exchange::Exchange;
use super::facts::Facts;

/// The width of the lines with what all ranks share.
const WIDTH: usize = 96;
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

/// The columns that are shown for each rank although all may be equal: rank to local, and the clock.
const ALWAYS: [usize; 6] = [0, 1, 2, 3, 4, 10];

pub(super) fn text(report: &Report<'_>) -> String {
    let Report { ranks, clocks, exchanges, problems } = *report;
    let of_ranks = ranks.iter().zip(clocks).zip(exchanges);
    let rows: Vec<[String; 14]> = of_ranks.map(|((rank, clock), exchange)| row(rank, *clock, exchange)).collect();
    let plural = if ranks.len() == 1 { "" } else { "s" };
    let version = ranks.first().map(|rank| format!("gradsync {}, {} rank{plural}", rank.version, ranks.len()));
    let mut lines: Vec<String> = version.into_iter().chain(table(&rows)).collect();
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

/// The values that all ranks share, then a table of the others: terminals are narrow, and differences are to be found.
fn table(rows: &[[String; 14]]) -> Vec<String> {
    let is_shared = |column: usize| !ALWAYS.contains(&column) && rows.iter().all(|row| row[column] == rows[0][column]);
    let (shared, own): (Vec<usize>, Vec<usize>) = (0..HEADINGS.len()).partition(|&column| is_shared(column));
    let mut lines = Vec::new();
    if !shared.is_empty() {
        let values = shared.iter().map(|&column| format!("{} {}", HEADINGS[column], rows[0][column]));
        lines.push(wrapped(&format!("on all ranks: {}", values.collect::<Vec<_>>().join(", ")), WIDTH));
    }
    let headings = HEADINGS.map(str::to_owned);
    let all: Vec<&[String; 14]> = std::iter::once(&headings).chain(rows).collect();
    let width = |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
    lines.extend(all.iter().map(|row| {
        let cells = own.iter().map(|&column| format!("{:1$}", row[column], widths[column]));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    }));
    lines
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
        rank.address.clone().unwrap_or_else(|| if rank.uses_mpi { "by MPI" } else { "unknown" }.into()),
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
    fn table_has_columns_for_differences_and_fits_a_terminal() {
        let row = |rank: usize, nccl: &str| {
            let mut row = HEADINGS.map(|heading| format!("{heading}, the same on all ranks"));
            [0, 1, 2, 3, 4, 10].into_iter().for_each(|column| row[column] = format!("{rank}"));
            row[7] = nccl.to_owned();
            row
        };
        let lines = table(&[row(0, "2.21.5"), row(1, "2.18.1")]);
        let rows: Vec<&String> = lines.iter().skip_while(|line| !line.starts_with("rank")).collect();
        assert_eq!(
            rows,
            [
                "rank  host  address  process  local  NCCL    clock",
                "0     0     0        0        0      2.21.5  0",
                "1     1     1        1        1      2.18.1  1"
            ]
        );
        assert!(lines[0].starts_with("on all ranks: exchange exchange, the same on all ranks, GPU"), "{}", lines[0]);
        assert!(lines.iter().flat_map(|line| line.lines()).all(|line| line.chars().count() <= WIDTH), "{lines:?}");
    }

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
