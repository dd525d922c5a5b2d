//! exchange: any number of transfers at once, in any order between ranks, and refusals on both ends.

use std::time::{Duration, Instant};

use gradsync::Error;
use gradsync::comm::{Collectives, CommError, Communicator, Ranks};

use super::cases::Cases;

/// Payload `number` from one rank to another.
fn message(from: usize, to: usize, number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 7 + from * 31 + to * 57 + number * 101) as u8).collect()
}

fn room(len: usize) -> Vec<u8> {
    vec![0x77; len]
}

/// Receives one payload, in a call of its own.
fn receive(comm: &dyn Communicator, from: usize, len: usize) -> Vec<u8> {
    let mut data = room(len);
    comm.exchange(&[], &mut [(from, (&mut data).into())]).unwrap();
    data
}

const LENS: [usize; 6] = [0, 1, 300_001, 33, 0, 70_000];

pub(crate) fn run(cases: &mut Cases) {
    cases.check("nothing", |comm| comm.exchange(&[], &mut []).unwrap());
    cases.check("all with all, six messages a pair, in other orders on each rank", |comm| all_with_all(comm));
    for len in [5, 300_001] {
        cases.check(&format!("ranks that wait for each other in a ring, {len} bytes"), |comm| crossing(comm, len));
    }
    cases.check("several at once meet one after the other", |comm| one_after_the_other(comm));
    cases.check("a send that the peer takes before it is heard", |comm| unheard(comm));
    cases.check("a pipeline of exchanges", |comm| pipeline(comm));
    cases.check("peers that do not exist break nothing", |comm| no_peers(comm));
    refusals(cases);
    cases.done("exchange");
}

fn all_with_all(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut peers: Vec<usize> = (0..world_size).filter(|&peer| peer != rank).collect();
    let shift = rank * 3 % peers.len();
    peers.rotate_left(shift);
    let lens = || LENS.into_iter().enumerate();
    // Sends are ordered by payload and then by peer, receives by peer and then by payload: the order matters only within each pair of
    // ranks.
    let sent: Vec<(usize, Vec<u8>)> = lens()
        .flat_map(|(number, len)| peers.iter().map(move |&peer| (peer, message(rank, peer, number, len))))
        .collect();
    let expected: Vec<(usize, Vec<u8>)> = peers
        .iter()
        .rev()
        .flat_map(|&peer| lens().map(move |(number, len)| (peer, message(peer, rank, number, len))))
        .collect();
    let mut got: Vec<Vec<u8>> = expected.iter().map(|(_, data)| room(data.len())).collect();
    let sends: Vec<_> = sent.iter().map(|(peer, data)| (*peer, data.into())).collect();
    let mut receives: Vec<_> = expected.iter().zip(&mut got).map(|((peer, _), data)| (*peer, data.into())).collect();
    comm.exchange(&sends, &mut receives).unwrap();
    for ((peer, expected), got) in expected.iter().zip(&got) {
        assert!(expected == got, "{} bytes from rank {peer} differ", expected.len());
    }
}

/// Rank 0 sends and receives in one call; every other rank receives before it sends.
fn crossing(comm: &dyn Communicator, len: usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (next, last) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let sent = message(rank, next, 0, len);
    let received = if rank == 0 {
        let mut data = room(len);
        comm.exchange(&[(next, (&sent).into())], &mut [(last, (&mut data).into())]).unwrap();
        data
    } else {
        let data = receive(comm, last, len);
        comm.exchange(&[(next, (&sent).into())], &mut []).unwrap();
        data
    };
    assert!(received == message(last, rank, 0, len), "bytes differ");
}

/// Rank 0 makes one call, and rank 1 makes four.
fn one_after_the_other(comm: &dyn Communicator) {
    const LEN: usize = 100_003;
    match comm.rank() {
        0 => {
            let sent = [0, 1].map(|number| message(0, 1, number, LEN + number));
            let mut got = [0, 1].map(|number| room(LEN + number));
            let [first, second] = &mut got;
            comm.exchange(
                &[(1, (&sent[0]).into()), (1, (&sent[1]).into())],
                &mut [(1, first.into()), (1, second.into())],
            )
            .unwrap();
            assert!(got == [0, 1].map(|number| message(1, 0, number, LEN + number)), "bytes differ");
        }
        1 => {
            for number in [0, 1] {
                assert!(receive(comm, 0, LEN + number) == message(0, 1, number, LEN + number), "bytes differ");
                comm.exchange(&[(0, (&message(1, 0, number, LEN + number)).into())], &mut []).unwrap();
            }
        }
        _ => {}
    }
}

/// Both ranks send first, but rank 1 receives in the same call, which is no mismatch.
fn unheard(comm: &dyn Communicator) {
    let rank = comm.rank();
    if rank > 1 {
        return;
    }
    let (peer, sent) = (1 - rank, message(rank, 1 - rank, 0, 5000));
    let mut data = room(5000);
    if rank == 0 {
        comm.exchange(&[(peer, (&sent).into())], &mut []).unwrap();
        data = receive(comm, peer, 5000);
    } else {
        comm.exchange(&[(peer, (&sent).into())], &mut [(peer, (&mut data).into())]).unwrap();
    }
    assert!(data == message(peer, rank, 0, 5000), "bytes differ");
}

/// In each step a rank passes on the payload of the last step, while it receives the next.
fn pipeline(comm: &dyn Communicator) {
    const STEPS: usize = 20;
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let step = |number: usize| message(0, 0, number, 1000 + number);
    let mut held: Option<Vec<u8>> = None;
    for tick in 0..STEPS + world_size {
        let number = tick.checked_sub(rank).filter(|&number| number < STEPS);
        let passed_on = held.take().filter(|_| rank + 1 < world_size);
        let mut data = room(number.map_or(0, |number| step(number).len()));
        let sends: Vec<_> = passed_on.iter().map(|data| (rank + 1, data.into())).collect();
        let from = rank.checked_sub(1).filter(|_| number.is_some());
        let mut receives = from.map(|from| vec![(from, (&mut data).into())]).unwrap_or_default();
        comm.exchange(&sends, &mut receives).unwrap();
        if let Some(number) = number {
            held = Some(if rank == 0 { step(number) } else { data });
            assert_eq!(held.as_ref(), Some(&step(number)), "step {number}");
        }
    }
}

fn no_peers(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (other, sent, mut data) = ((rank + 1) % world_size, [1u8], [2u8]);
    for peer in [rank, world_size, usize::MAX] {
        // The valid transfer of a refused call is not started either.
        let outcomes = [
            comm.exchange(&[(other, (&sent).into()), (peer, (&sent).into())], &mut []),
            comm.exchange(&[(other, (&sent).into())], &mut [(peer, (&mut data).into())]),
        ];
        for outcome in outcomes {
            let error = outcome.expect_err("no such peer");
            let Error::Comm(CommError::InvalidPeer { peer: named, .. }) = error else { panic!("{error:?}") };
            assert_eq!(named, peer);
        }
    }
    comm.barrier().unwrap();
    assert_eq!(data, [2]);
}

fn refusals(cases: &mut Cases) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    // Two payloads of different lengths, in opposite order on the two sides.
    cases.check_fresh("lengths that meet in another order", |comm| {
        let (short, long) = (message(0, 1, 0, 1010), message(0, 1, 1, 1011));
        let (mut one, mut other) = (room(1011), room(1010));
        let outcome = match rank {
            0 => comm.exchange(&[(1, (&short).into()), (1, (&long).into())], &mut []),
            1 => comm.exchange(&[], &mut [(0, (&mut one).into()), (0, (&mut other).into())]),
            _ => comm.barrier(),
        };
        assert_mismatch(outcome, &["1010", "1011"]);
        assert_eq!((one, other), (room(1011), room(1010)));
    });
    // The transfer from 0 to 1 does not match; every other transfer may have completed, and no rank hangs.
    cases.check_fresh("one of many transfers does not fit", |comm| {
        let peers = || (0..world_size).filter(|&peer| peer != rank);
        let len = |from: usize, to: usize| if (from, to) == (0, 1) { 40_001 } else { 40_000 };
        let sent: Vec<Vec<u8>> = peers().map(|peer| message(rank, peer, 0, len(rank, peer))).collect();
        let mut got: Vec<Vec<u8>> = peers().map(|_| room(40_000)).collect();
        let sends: Vec<_> = peers().zip(sent.iter().map(Into::into)).collect();
        let mut receives: Vec<_> = peers().zip(got.iter_mut().map(Into::into)).collect();
        let outcome = comm.exchange(&sends, &mut receives);
        assert_mismatch(outcome.and_then(|()| comm.barrier()), &["40000", "40001"]);
    });
    cases.check_fresh("bytes meet numbers", |comm| {
        let (sent, mut numbers) = (message(0, 1, 0, 10), vec![7.0f32; 10]);
        let outcome = match rank {
            0 => comm.exchange(&[(1, (&sent).into())], &mut []),
            1 => comm.recv(&mut numbers, 0),
            _ => comm.barrier(),
        };
        assert_mismatch(outcome, &["u8", "f32"]);
        assert_eq!(numbers, [7.0; 10]);
    });
    cases.check_fresh("two ranks do nothing but send to each other", |comm| {
        let sent = message(rank, 1, 0, 10);
        let outcome = if rank < 2 { comm.exchange(&[(1 - rank, (&sent).into())], &mut []) } else { comm.barrier() };
        assert_mismatch(outcome, &["rank 0 called send", "rank 1 called send"]);
    });
    cases.check_fresh("a collective meets an exchange", |comm| {
        let sent = message(rank, 0, 0, 10);
        let outcome = if rank == 1 { comm.exchange(&[(0, (&sent).into())], &mut []) } else { comm.barrier() };
        assert_mismatch(outcome, &["barrier", "send"]);
    });
    cases.check_fresh("a peer that does not come is named", |comm| {
        let comm = comm.with_deadline(Duration::from_millis(300));
        let (start, sent, mut data) = (Instant::now(), message(0, 1, 0, 10), room(10));
        // Rank 1 receives the first payload and never sends the second.
        let outcome = match rank {
            0 => comm.exchange(&[(1, (&sent).into())], &mut [(1, (&mut data).into())]),
            1 => comm.exchange(&[], &mut [(0, (&mut data).into())]).and_then(|()| {
                std::thread::sleep(Duration::from_millis(900));
                comm.barrier()
            }),
            _ => {
                std::thread::sleep(Duration::from_millis(900));
                comm.barrier()
            }
        };
        let error = outcome.expect_err("nothing is sent");
        let Error::Comm(CommError::Timeout { missing, .. }) = error else { panic!("{error:?}") };
        assert_eq!(missing, [1]);
        assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
    });
}

#[track_caller]
fn assert_mismatch(outcome: gradsync::Result<()>, words: &[&str]) {
    let error = outcome.expect_err("the ends differ");
    assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error:?}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "\"{text}\" does not name {word}");
    }
}
