//! The reports to a rank: which counts it gets and when; and the room for its calls.

use super::*;

fn announced(calls: usize) -> Posted {
    Posted { calls, contribution: None, is_awaited: false }
}

#[test]
fn news_has_the_announced_calls_that_were_asked_for() {
    let mut own = Announcements::default();
    (0..3).for_each(|_| own.post(announced(2)));
    own.post(Posted { is_awaited: true, ..announced(2) });
    assert!(own.ask(4) && !own.ask(7), "six were announced");
    assert!(!own.complete() && own.lacks(3) && !own.lacks(2));
    assert_eq!(own.news(), None, "four were asked for");
    assert!(!own.complete());
    assert_eq!((own.news(), own.news()), (Some(4), None));
    assert!(!own.complete() && own.complete(), "the rank waits for the last list");
    assert_eq!((own.last_news(), own.last_news()), (Some(6), None), "awaited calls do not count");
    assert!(!own.complete(), "no list is left");
}

#[test]
fn news_answers_each_number_that_was_asked_for() {
    for asked in [[1, 3], [3, 1]] {
        let mut own = Announcements::default();
        (0..3).for_each(|_| own.post(announced(1)));
        assert!(asked.into_iter().all(|calls| own.ask(calls)));
        assert_eq!(own.news(), None);
        let told = (0..3).map(|_| {
            own.complete();
            own.news()
        });
        assert_eq!(told.collect::<Vec<_>>(), [Some(1), None, Some(3)], "asked for {asked:?}");
        assert!(own.ask(2));
        assert_eq!(own.news(), None, "known already");
    }
}

#[test]
fn news_comes_now_and_then_without_being_asked_for() {
    let mut own = Announcements::default();
    let told = (0..4 * TELL_EVERY).filter_map(|_| {
        own.post(announced(1));
        own.complete();
        own.news()
    });
    assert_eq!(told.collect::<Vec<_>>(), [1, 2, 3, 4].map(|times| times * TELL_EVERY));
}

#[test]
fn has_room_for_the_calls_of_members_and_no_more() {
    let mut own = Announcements::default();
    let mut posted = 0;
    while own.has_room(1024) {
        own.post(announced(1024));
        posted += 1024;
    }
    assert!((ANNOUNCED_LIMIT as usize + CALLS_LIMIT..64 << 10).contains(&posted), "{posted}");
}
