//! Launches, given as lines and ends.

use super::*;
use crate::multi_gpu::launch::Cause;

/// Two ranks; the second may be a victim.
fn two(victim: bool) -> Ledger {
    Ledger::new([(Who::Rank(0), false), (Who::Rank(1), victim)])
}

fn case(name: &str, outcome: &str, note: &str) -> String {
    format!(r#"@{{"case":"{name}","outcome":"{outcome}","seconds":0.5,"note":"{note}"}}"#)
}

fn feed<const N: usize>(mut ledger: Ledger, lines: [(usize, String); N]) -> Ledger {
    for (index, line) in lines {
        ledger.line(index, &line);
    }
    ledger
}

/// Each case as "name: outcome", followed by its notes.
fn shown(verdict: &Verdict) -> Vec<String> {
    let show = |case: &Case| format!("{}: {:?}; {}", case.name, case.outcome, case.notes.join("; "));
    verdict.cases.iter().map(show).collect()
}

const FINE: [End; 2] = [End::Exited(0), End::Exited(0)];

#[test]
fn a_case_passes_when_every_process_reports_that_it_passed() {
    let lines = [(0, case("f32", "passed", "")), (1, case("f32", "passed", "slow"))];
    let verdict = feed(two(false), lines).close(&FINE);
    assert_eq!(shown(&verdict), ["f32: Passed; rank 1 passed: slow"]);

    let one = Ledger::new([(Who::AllRanks, false)]);
    let verdict = feed(one, [(0, case("f32", "passed", ""))]).close(&[End::Exited(0)]);
    assert_eq!(shown(&verdict), ["f32: Passed; "]);
}

#[test]
fn a_case_that_one_process_does_not_report_has_failed() {
    let verdict = feed(two(false), [(0, case("f32", "passed", ""))]).close(&FINE);
    assert_eq!(shown(&verdict), ["f32: Failed; rank 1 did not report it"]);
}

#[test]
fn a_failed_case_names_its_ranks_and_explains_their_exit_code() {
    let lines = [(0, case("f32", "passed", "")), (1, case("f32", "failed", "off by 3"))];
    let verdict = feed(two(false), lines).close(&[End::Exited(0), End::Exited(1)]);
    assert_eq!(shown(&verdict), ["f32: Failed; rank 1 failed: off by 3"]);
}

#[test]
fn a_bad_end_that_no_case_explains_is_a_failure_of_its_own() {
    let lines = || [(0, case("f32", "passed", "")), (1, case("f32", "passed", ""))];
    let launch = |ends: [End; 2]| shown(&feed(two(false), lines()).close(&ends)).swap_remove(1);
    let expected = "the launch itself: Failed; rank 1 exited with code 1; the last case that it reported is f32";
    assert_eq!(launch([End::Exited(0), End::Exited(1)]), expected);
    let expected = "the launch itself: Failed; \
        rank 0 still ran after another had failed, and was killed; the last case that it reported is f32; \
        rank 1 was ended by signal 6 (SIGABRT); the last case that it reported is f32";
    assert_eq!(launch([End::Killed(Cause::OtherFailed), End::Signal("6 (SIGABRT)".into())]), expected);
    assert!(launch([End::Exited(0), End::Exited(SANITIZER_CODE)]).contains("compute-sanitizer's for an error"));

    let verdict = two(false).close(&[End::Exited(0), End::Killed(Cause::Deadline)]);
    let expected = "the launch itself: Failed; rank 1 still ran at the deadline, and was killed; it reported no case";
    assert_eq!(shown(&verdict), [expected]);
}

#[test]
fn a_launch_without_a_case_has_failed() {
    assert_eq!(shown(&two(false).close(&FINE)), ["the launch itself: Failed; no case was reported"]);
}

#[test]
fn a_victim_need_not_report_but_has_to_end_badly() {
    let lines = || [(0, case("f32", "passed", "")), (1, case("f32", "failed", "on purpose"))];
    for end in [End::Exited(7), End::Signal("9 (SIGKILL)".into()), End::Killed(Cause::Outlived)] {
        let verdict = feed(two(true), lines()).close(&[End::Exited(0), end.clone()]);
        assert_eq!(shown(&verdict), ["f32: Passed; rank 1 failed: on purpose"]);
        let verdict = feed(two(true), [(0, case("f32", "passed", ""))]).close(&[End::Exited(0), end]);
        assert_eq!(shown(&verdict), ["f32: Passed; "]);
    }
    let verdict = feed(two(true), [(0, case("f32", "passed", ""))]).close(&FINE);
    assert!(shown(&verdict)[1].contains("rank 1 was expected to end badly, and exited with code 0"));
    // The other ranks have missed a case that only the victim reported.
    let verdict = feed(two(true), [(1, case("f32", "passed", ""))]).close(&[End::Exited(0), End::Exited(7)]);
    assert_eq!(shown(&verdict), ["f32: Failed; rank 0 did not report it"]);
}

#[test]
fn a_case_is_not_run_when_all_agree_on_it() {
    let lines = [(0, case("f8", "not-run", "too old")), (1, case("f8", "not-run", "too old"))];
    assert_eq!(shown(&feed(two(false), lines).close(&FINE)), ["f8: NotRun; too old"]);
    let lines = [(0, case("f8", "not-run", "")), (1, case("f8", "not-run", "too old"))];
    let expected = "f8: NotRun; rank 0 did not run it; rank 1 did not run it: too old";
    assert_eq!(shown(&feed(two(false), lines).close(&FINE)), [expected]);
    let lines = [(0, case("f8", "passed", "")), (1, case("f8", "not-run", "too old"))];
    let expected = "f8: Failed; rank 1 did not run it: too old; some ran it and others did not";
    assert_eq!(shown(&feed(two(false), lines).close(&FINE)), [expected]);
}

#[test]
fn two_cases_of_one_name_do_not_hide_each_other() {
    let passed = || case("f32", "passed", "");
    let verdict = feed(two(false), [(0, passed()), (1, passed()), (0, passed())]).close(&FINE);
    assert_eq!(shown(&verdict), ["f32: Failed; rank 0 reported it 2 times"]);
}

#[test]
fn a_result_that_cannot_be_read_is_a_failure_that_names_the_line() {
    let bad = ["@{oops", "@{\"cas\":\"f32\"}", "@[]", "@{\"case\":\"f32\",\"outcome\":\"fine\"}"];
    for line in bad {
        let good = [(0, case("f32", "passed", "")), (1, case("f32", "passed", ""))];
        let mut ledger = feed(two(false), good);
        assert_eq!(ledger.line(1, line).as_deref(), Some(line));
        let shown = shown(&ledger.close(&FINE));
        let expected = format!("the launch itself: Failed; rank 1 printed a result that cannot be read: {line} (");
        assert!(shown[1].starts_with(&expected), "{shown:?}");
    }
    // A victim's line may be incomplete.
    let mut ledger = feed(two(true), [(0, case("f32", "passed", ""))]);
    assert_eq!(ledger.line(1, "@{oops").as_deref(), Some("@{oops"));
    assert_eq!(shown(&ledger.close(&[End::Exited(0), End::Exited(9)])), ["f32: Passed; "]);
}

#[test]
fn only_bad_news_is_shown_at_once() {
    let mut ledger = two(false);
    assert_eq!(ledger.line(0, "plain @{text}").as_deref(), Some("plain @{text}"));
    assert_eq!(ledger.line(0, &case("f32", "passed", "")), None);
    assert_eq!(ledger.line(1, &case("f32", "failed", "off")).as_deref(), Some("FAILED f32: off"));
}
