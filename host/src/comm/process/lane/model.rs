//! The lane's protocol with loom's memory: every order of the accesses of a writer and a reader, with each ordering of the atomic accesses.

use loom::sync::atomic::AtomicU64 as Word;

use super::*;
use crate::memory::shared_bytes::model::{Access, Model, Weakened, assert_is_missed, explore};

/// Room for two short messages.
const CAPACITY: usize = 4;
/// Three messages, the last of which begins again at the start of the buffer.
const MESSAGES: [[u8; 2]; 3] = [[1, 2], [3, 4], [5, 6]];

type End = Lane<Arc<Model>>;

/// The writer's and the reader's end of a lane.
fn ends(weakened: Option<Weakened>) -> [End; 2] {
    let bytes = (HEADER_BYTES..HEADER_BYTES + CAPACITY).map(|at| at..at + 1);
    let memory = Model::new(&[WRITTEN_AT, CANCELLED_AT, READ_AT], bytes, weakened);
    [(); 2].map(|()| Lane::new(Arc::new(memory.clone()), 0, CAPACITY))
}

/// Reads until all messages are there, or until a read is in vain: what a second one would see, the first sees in another order. Returns
/// whether all messages are there.
fn read_all(reader: &End) -> bool {
    let (mut received, sent) = (Vec::new(), MESSAGES.concat());
    while reader.read(&mut received).expect("possible counters") {
        assert_eq!(received, sent[..received.len()]);
    }
    received == sent
}

/// Writes frames of a header and a payload, until there is no room.
fn write_frames(writer: &End) {
    MESSAGES.iter().all(|[header, payload]| writer.write(&[&[*header], &[*payload]]).expect("possible counters"));
}

/// Writes the same bytes, up to three at a time, as many as there is room for.
fn write_pieces(writer: &End) {
    let (bytes, mut begin) = (MESSAGES.concat(), 0);
    loop {
        let end = bytes.len().min(begin + 3);
        match writer.write_some(&bytes[begin..end]).expect("possible counters") {
            0 => return,
            written => begin += written,
        }
    }
}

fn explore_stream(name: &str, write: fn(&End), weakened: Option<Weakened>) {
    let arrivals = Arc::new(AtomicU64::new(0));
    let counted = arrivals.clone();
    explore(name, None, move || {
        let [writer, reader] = ends(weakened);
        let writing = loom::thread::spawn(move || write(&writer));
        counted.fetch_add(u64::from(read_all(&reader)), Ordering::Relaxed);
        writing.join().expect("no panic");
    });
    assert!(arrivals.load(Ordering::Relaxed) > 0, "no order brings all messages");
}

/// The writer cancels an offer and changes the message's words, which the reader copies: a copy that counts as whole has no changed word.
fn explore_cancellation(weakened: Option<Weakened>) {
    let wholes = Arc::new(AtomicU64::new(0));
    let counted = wholes.clone();
    explore("cancelled offer", None, move || {
        let [writer, reader] = ends(weakened);
        let offered = writer.cancelled();
        let message = Arc::new([Word::new(7), Word::new(7)]);
        let memory = message.clone();
        let sending = loom::thread::spawn(move || {
            writer.cancel();
            memory.iter().for_each(|word| word.store(8, Ordering::Relaxed));
        });
        let copy = message.each_ref().map(|word| word.load(Ordering::Relaxed));
        if reader.cancelled_after_reading() == offered {
            assert_eq!(copy, [7, 7], "a changed message counts as whole");
            counted.fetch_add(1, Ordering::Relaxed);
        }
        sending.join().expect("no panic");
    });
    assert!(wholes.load(Ordering::Relaxed) > 0, "no order brings the message");
}

fn explore_all(weakened: Option<Weakened>) {
    explore_stream("frames", write_frames, weakened);
    explore_stream("pieces", write_pieces, weakened);
    explore_cancellation(weakened);
}

#[test]
fn lane_holds_under_every_order_of_accesses() {
    explore_all(None);
}

/// The orderings of the cancelled offers' count are stronger than needed, because fences stand beside them.
#[test]
fn lane_fails_under_every_weaker_ordering() {
    use Ordering::{Acquire, Relaxed, Release};
    for (at, access, to) in [
        (WRITTEN_AT, Access::Load, Relaxed),
        (WRITTEN_AT, Access::Store, Relaxed),
        (READ_AT, Access::Load, Relaxed),
        (READ_AT, Access::Store, Relaxed),
    ] {
        let weakened = Weakened { at, access, to };
        assert_is_missed(&weakened, || explore_stream("frames", write_frames, Some(weakened)));
        assert_is_missed(&weakened, || explore_stream("pieces", write_pieces, Some(weakened)));
    }
    // An acquiring fence is none for the writer, and a releasing one is none for the reader.
    for to in [Acquire, Release, Relaxed] {
        let weakened = Weakened { at: CANCELLED_AT, access: Access::Fence, to };
        assert_is_missed(&weakened, || explore_cancellation(Some(weakened)));
    }
}
