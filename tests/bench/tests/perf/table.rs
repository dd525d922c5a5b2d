//! The table: nccl-tests' columns, consistent numbers, and a verdict.

use crate::run::{QUICK, perf};

/// The fields of all rows.
fn rows(stdout: &str) -> Vec<Vec<&str>> {
    let lines = stdout.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.map(|line| line.split_whitespace().collect()).collect()
}

fn number(text: &str) -> f64 {
    text.parse().unwrap_or_else(|error| panic!("`{text}`: {error}"))
}

#[test]
fn columns_are_those_of_nccl_tests_with_p99_and_a_baseline() {
    let finished = perf(&[&QUICK[..], &["all_gather", "-b", "64K", "-e", "1M", "-f", "4", "-g", "2"]].concat())
        .succeeded("all_gather");
    let words: Vec<Vec<&str>> = finished.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    let side = ["time", "p99", "algbw", "busbw", "#wrong"];
    let heads = [&["#", "size", "count", "type", "redop", "root"][..], &side, &side, &["time", "ratio"]].concat();
    assert!(words.contains(&heads), "{}", finished.stdout);
    // The name of the baseline is above its columns.
    assert!(finished.stdout.lines().any(|line| line.trim_end().ends_with("parallel memcpy")), "{}", finished.stdout);
    for word in
        ["limit: ", "out-of-place", "in-place", "(elements)", "# gradsync", "# CPU:", "1 warm-up rounds, 3 counted"]
    {
        assert!(finished.stdout.contains(word), "{word}: {}", finished.stdout);
    }
    let rows = rows(&finished.stdout);
    assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), ["65536", "262144", "1048576"]);
    for row in rows {
        assert_eq!(row.len(), heads.len() - 1, "{row:?}");
        // Half of the elements are each rank's shard.
        assert_eq!(number(row[1]), number(row[0]) / 8.0, "{row:?}");
        assert_eq!(row[2..5], ["f32", "none", "-1"], "{row:?}");
        for side in [&row[5..10], &row[10..15]] {
            let (time, p99, algbw, busbw) = (number(side[0]), number(side[1]), number(side[2]), number(side[3]));
            assert!(time > 0.0 && p99 >= time, "{row:?}");
            let expected = number(row[0]) / time / 1e3;
            // Both bandwidths are printed with two decimals.
            assert!((algbw - expected).abs() <= 0.006 + 0.01 * expected, "{row:?}");
            assert!((busbw - algbw / 2.0).abs() <= 0.011, "{row:?}");
            assert_eq!(side[4], "0", "{row:?}");
        }
        let ratio = number(row[15]) / number(row[10]);
        assert!((number(row[16]) - ratio).abs() <= 0.001 + 0.01 * ratio, "{row:?}");
    }
    assert!(finished.stdout.contains("# Out of bounds values : 0 OK"), "{}", finished.stdout);
    assert!(finished.stdout.contains("# Avg bus bandwidth    : "), "{}", finished.stdout);
}

#[test]
fn what_an_operation_does_not_have_is_not_available() {
    let finished = perf(&[&QUICK[..], &["zero", "cast", "-b", "64K", "-c", "0", "--no-baseline"]].concat())
        .succeeded("zero, cast");
    let rows = rows(&finished.stdout);
    assert_eq!(rows.len(), 2, "{}", finished.stdout);
    let absent = ["N/A"; 5];
    // Clearing is in place, and a cast is not; without a check there is no number of wrong elements.
    assert_eq!((&rows[0][5..10], rows[0][14]), (&absent[..], "N/A"), "{:?}", rows[0]);
    assert_eq!((&rows[1][10..15], rows[1][9]), (&absent[..], "N/A"), "{:?}", rows[1]);
    assert!(rows.iter().all(|row| row[15..] == ["N/A", "N/A"]), "{rows:?}");
    assert!(finished.stdout.contains("not checked") && finished.stdout.contains("no baseline"), "{}", finished.stdout);
    // No progress is shown if stderr is not a terminal.
    assert_eq!(finished.stderr, "");
}

#[test]
fn what_one_number_of_ranks_cannot_do_is_measured_on_the_others() {
    let arguments = ["adasum", "--transport", "local", "--algorithm", "tree", "-g", "3,4", "-b", "4K"];
    let finished = perf(&[&QUICK[..], &arguments].concat()).succeeded("3 and 4 ranks");
    let rows = rows(&finished.stdout);
    assert_eq!((rows.len(), rows[0][3]), (1, "tree"), "{}", finished.stdout);
    assert!(finished.stdout.contains("# adasum on cpu over local, 4 ranks"), "{}", finished.stdout);
    let reason = "# not measured: adasum on local: adasum by the tree needs a power of two, not 3 ranks";
    assert!(finished.stdout.contains(reason), "{}", finished.stdout);
}
