//! send, recv and send_recv: order, lengths, and refusals on both ends.

use gradsync::comm::{Collectives, CommError, Ranks, ReduceOp};
use gradsync::{Error, f16};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;

use super::cases::Cases;

pub(crate) fn run(cases: &mut Cases) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    for format in Format::ALL {
        cases.check(&format!("a pipeline of {format:?}"), |comm| {
            for (message, len) in [0, 1, 33, 4097, 100_003].into_iter().enumerate() {
                let sent = vector(format, len, message as u64);
                let mut data = Array::new(format, &sent);
                if rank > 0 {
                    data = Array::unwritten(format, len);
                    comm.recv(data.slice_mut(), rank - 1).unwrap();
                }
                if rank + 1 < world_size {
                    comm.send(data.slice(), rank + 1).unwrap();
                }
                assert_eq!(data.values(), sent, "message {message}");
            }
        });
        for len in [0, 1, 4097, 300_001] {
            cases.check(&format!("a ring of {len} {format:?}"), |comm| {
                let (to, from) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
                let data = Array::new(format, &vector(format, len, rank as u64));
                let mut received = Array::unwritten(format, len);
                comm.send_recv(data.slice(), to, received.slice_mut(), from).unwrap();
                assert_eq!(received.values(), vector(format, len, from as u64));
            });
        }
    }
    cases.check("partners send different lengths", |comm| {
        let partner = rank ^ 1;
        if partner < world_size {
            let data = vec![rank as f32; 3 + rank % 2];
            let mut received = vec![7.0f32; 3 + partner % 2];
            comm.send_recv(&data, partner, &mut received, partner).unwrap();
            assert_eq!(received, vec![partner as f32; 3 + partner % 2]);
        }
    });
    cases.check("send_recv meets recv and send", |comm| {
        let (mut data, own) = (vec![7.0f32; 5], vec![rank as f32; 5]);
        match rank {
            0 => comm.send_recv(&own, 1, &mut data, 1).unwrap(),
            1 => {
                comm.recv(&mut data, 0).unwrap();
                comm.send(&own, 0).unwrap();
            }
            _ => return,
        }
        assert_eq!(data, vec![(1 - rank) as f32; 5]);
    });
    cases.check("a transfer between two between collectives of all", |comm| {
        comm.barrier().unwrap();
        let mut data = vec![rank as f64; 9];
        if rank == 0 {
            comm.send(&data, world_size - 1).unwrap();
        } else if rank + 1 == world_size {
            comm.recv(&mut data, 0).unwrap();
            assert_eq!(data, [0.0; 9]);
        }
        comm.all_reduce(&mut data, ReduceOp::Max).unwrap();
        assert_eq!(data, [world_size.saturating_sub(2) as f64; 9]);
    });
    cases.check("peers that do not exist break nothing", |comm| {
        let mut data = [1.0f32];
        for peer in [rank, world_size, usize::MAX] {
            let outcomes = [comm.send(&data, peer), comm.recv(&mut data, peer)];
            for outcome in outcomes {
                let error = outcome.expect_err("no such peer");
                assert!(matches!(error, Error::Comm(CommError::InvalidPeer { .. })), "{error:?}");
            }
        }
        comm.barrier().unwrap();
    });
    refusals(cases);
    cases.done("point to point");
}

fn refusals(cases: &mut Cases) {
    let rank = cases.rank();
    cases.check_fresh("counts differ", |comm| {
        let (sent, mut received) = (vec![1.0f32; 1010], vec![7.0f32; 1011]);
        let outcome = match rank {
            0 => comm.send(&sent, 1),
            1 => comm.recv(&mut received, 0),
            _ => comm.barrier(),
        };
        assert_mismatch(outcome, ["1010", "1011"]);
        assert_eq!(received, [7.0f32; 1011]);
    });
    cases.check_fresh("dtypes differ", |comm| {
        let (sent, mut received) = (vec![1.0f32; 10], vec![f16::ONE; 10]);
        let outcome = match rank {
            0 => comm.send(&sent, 1),
            1 => comm.recv(&mut received, 0),
            _ => comm.barrier(),
        };
        assert_mismatch(outcome, ["f32", "f16"]);
    });
    // Every transfer matches except the one into rank 0: each rank moves the data that it can, and no rank hangs.
    cases.check_fresh("one direction of a ring differs", |comm| {
        let world_size = comm.world_size();
        let (to, from) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
        let sent = vec![1.0f32; 40_000];
        let mut received = vec![7.0f32; if rank == 0 { 40_001 } else { 40_000 }];
        let outcome = comm.send_recv(&sent, to, &mut received, from);
        assert_mismatch(outcome.and_then(|()| comm.barrier()), ["40000", "40001"]);
    });
    cases.check_fresh("two ranks send to each other", |comm| {
        let sent = vec![1.0f32; 10];
        let outcome = if rank < 2 { comm.send(&sent, 1 - rank) } else { comm.barrier() };
        assert_mismatch(outcome, ["rank 0 called send", "rank 1 called send"]);
    });
}

#[track_caller]
fn assert_mismatch(outcome: gradsync::Result<()>, words: [&str; 2]) {
    let error = outcome.expect_err("the ends differ");
    assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error:?}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "\"{text}\" does not name {word}");
    }
}
