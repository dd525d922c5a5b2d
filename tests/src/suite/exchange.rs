//! exchange: any number of transfers at once, in any order between ranks, and refusals on both ends.

use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::Error;
use gradsync::comm::{Collectives, CommError, Communicator, Ranks};

use super::{Suite, Transport, assert_mismatch};
use crate::ranks::exchange_bytes;

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
    exchange_bytes(comm, &[], &mut [(from, &mut data)]).unwrap();
    data
}

/// Sends one payload, in a call of its own.
fn send(comm: &dyn Communicator, to: usize, data: &[u8]) {
    exchange_bytes(comm, &[(to, data)], &mut []).unwrap();
}

const LENS: [usize; 6] = [0, 1, 300_001, 33, 0, 70_000];

/// All cases, for at least two ranks.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    suite.check("all with all, six messages a pair, in other orders on each rank", |comm| all_with_all(comm));
    for len in [5, 300_001] {
        suite.check(&format!("ranks that wait for each other in a ring, {len} bytes"), |comm| crossing(comm, len));
    }
    suite.check("several at once meet one after the other", |comm| one_after_the_other(comm));
    suite.check("a send that the peer takes before it is heard", |comm| unheard(comm));
    suite.check("a pipeline of exchanges", |comm| pipeline(comm));
    if suite.world_size() > 2 {
        for is_third_first in [false, true] {
            suite.check("transfers of one call complete in the order of the peers", |comm| {
                in_any_order(comm, is_third_first);
            });
        }
        suite.check("the first transfer of a list completes last", |comm| last_first(comm));
    }
    refusals(suite);
    suite.done("exchange");
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

/// Rank 0 sends to rank 1 and receives from rank 2, which wait for each other in either order.
fn in_any_order(comm: &dyn Communicator, is_third_first: bool) {
    let (rank, mut data) = (comm.rank(), [0]);
    let own = [rank as u8];
    match rank {
        0 => exchange_bytes(comm, &[(1, &own)], &mut [(2, &mut data)]).unwrap(),
        1 if is_third_first => exchange_bytes(comm, &[(2, &own)], &mut [(0, &mut data)]).unwrap(),
        1 | 2 => {
            data[0] = receive(comm, rank - 1, 1)[0];
            send(comm, (rank + 1) % 3, &data);
        }
        _ => return,
    }
    assert_eq!(data[0], if is_third_first { [1, 0, 1] } else { [0, 0, 0] }[rank]);
}

/// Rank 1 sends to rank 0 only once it has heard from rank 2, which must have completed its own send to rank 0 before.
fn last_first(comm: &dyn Communicator) {
    let (mut from_1, mut from_2) = ([0], [0]);
    match comm.rank() {
        0 => {
            exchange_bytes(comm, &[], &mut [(1, &mut from_1), (2, &mut from_2)]).unwrap();
            assert_eq!((from_1, from_2), ([31], [20]));
        }
        1 => send(comm, 0, &[receive(comm, 2, 1)[0] + 1]),
        2 => {
            send(comm, 0, &[20]);
            send(comm, 1, &[30]);
        }
        _ => {}
    }
}

fn refusals<T: Transport>(suite: &mut Suite<T>) {
    let (rank, world_size) = (suite.rank(), suite.world_size());
    // The first transfer matches, the second does not.
    suite.check_fresh("lengths differ in the middle of a list", |comm| {
        let (mut first, mut second) = (room(4), room(1011));
        let outcome = match rank {
            0 => exchange_bytes(&comm, &[(1, &[1; 4]), (1, &[1; 1010])], &mut []),
            1 => exchange_bytes(&comm, &[], &mut [(0, &mut first), (0, &mut second)]),
            _ => comm.barrier(),
        };
        assert_mismatch(outcome, &["1010", "1011"]);
        assert_eq!(second, room(1011));
    });
    // Two payloads of different lengths, in opposite order on the two sides.
    suite.check_fresh("lengths that meet in another order", |comm| {
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
    suite.check_fresh("one of many transfers does not fit", |comm| {
        let peers = || (0..world_size).filter(|&peer| peer != rank);
        let len = |from: usize, to: usize| if (from, to) == (0, 1) { 40_001 } else { 40_000 };
        let sent: Vec<Vec<u8>> = peers().map(|peer| message(rank, peer, 0, len(rank, peer))).collect();
        let mut got: Vec<Vec<u8>> = peers().map(|_| room(40_000)).collect();
        let sends: Vec<_> = peers().zip(sent.iter().map(Into::into)).collect();
        let mut receives: Vec<_> = peers().zip(got.iter_mut().map(Into::into)).collect();
        let outcome = comm.exchange(&sends, &mut receives);
        assert_mismatch(outcome.and_then(|()| comm.barrier()), &["40000", "40001"]);
    });
    suite.check_fresh("bytes meet numbers", |comm| {
        let (sent, mut numbers) = (message(0, 1, 0, 10), vec![7.0f32; 10]);
        let outcome = match rank {
            0 => exchange_bytes(&comm, &[(1, &sent)], &mut []),
            1 => comm.recv(&mut numbers, 0),
            _ => comm.barrier(),
        };
        assert_mismatch(outcome, &["u8", "f32"]);
        assert_eq!(numbers, [7.0; 10]);
    });
    suite.check_fresh("two ranks do nothing but send to each other", |comm| {
        let sent = message(rank, 1, 0, 10);
        let outcome = if rank < 2 { comm.exchange(&[(1 - rank, (&sent).into())], &mut []) } else { comm.barrier() };
        assert_mismatch(outcome, &["rank 0 called send", "rank 1 called send"]);
    });
    suite.check_fresh("a collective meets an exchange", |comm| {
        let sent = message(rank, 0, 0, 10);
        let outcome = if rank == 1 { comm.exchange(&[(0, (&sent).into())], &mut []) } else { comm.barrier() };
        assert_mismatch(outcome, &["barrier", "send"]);
    });
    suite.check_within(Duration::from_millis(300), "a peer that does not come is named", |comm| {
        let (start, sent, mut data) = (Instant::now(), message(0, 1, 0, 10), room(10));
        // Rank 1 receives the first payload and never sends the second.
        let outcome = match rank {
            0 => exchange_bytes(&comm, &[(1, &sent)], &mut [(1, &mut data)]),
            1 => exchange_bytes(&comm, &[], &mut [(0, &mut data)]).and_then(|()| {
                sleep(Duration::from_millis(900));
                comm.barrier()
            }),
            _ => {
                sleep(Duration::from_millis(900));
                comm.barrier()
            }
        };
        let error = outcome.expect_err("nothing is sent");
        let Error::Comm(CommError::Timeout { missing, .. }) = error else { panic!("{error:?}") };
        assert_eq!(missing, [1]);
        assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
    });
}
