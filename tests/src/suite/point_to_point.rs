//! send, recv and send_recv: order, lengths, and refusals on both ends. The cases of any memory are in [`data_movement`](super::data_movement).

use gradsync::comm::{Collectives, Ranks, ReduceOp};
use gradsync::f16;

use super::{Suite, Transport, assert_mismatch, neighbours};
use crate::array::Array;
use crate::inputs::vector;
use crate::oracle::Format;

/// All cases, for at least two ranks.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    let (rank, world_size) = (suite.rank(), suite.world_size());
    for format in Format::ALL {
        suite.check(&format!("a pipeline of {format:?}"), |comm| {
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
            suite.check(&format!("a ring of {len} {format:?}"), |comm| {
                let (to, from) = neighbours(comm);
                let data = Array::new(format, &vector(format, len, rank as u64));
                let mut received = Array::unwritten(format, len);
                comm.send_recv(data.slice(), to, received.slice_mut(), from).unwrap();
                assert_eq!(received.values(), vector(format, len, from as u64));
            });
        }
    }
    // Adasum's tree exchanges the two halves of a slice, which differ in length if the slice is odd.
    suite.check("partners send different lengths", |comm| {
        let partner = rank ^ 1;
        if partner < world_size {
            let data = vec![rank as f32; 3 + rank % 2];
            let mut received = vec![7.0f32; 3 + partner % 2];
            comm.send_recv(&data, partner, &mut received, partner).unwrap();
            assert_eq!(received, vec![partner as f32; 3 + partner % 2]);
        }
    });
    suite.check("send_recv meets recv and send", |comm| {
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
    suite.check("a transfer between two between collectives of all", |comm| {
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
    refusals(suite);
    suite.done("point to point");
}

fn refusals<T: Transport>(suite: &mut Suite<T>) {
    let rank = suite.rank();
    suite.check_fresh("counts differ", |comm| {
        let (sent, mut received) = (vec![1.0f32; 1010], vec![7.0f32; 1011]);
        let outcome = match rank {
            0 => comm.send(&sent, 1),
            1 => comm.recv(&mut received, 0),
            _ => comm.barrier(),
        };
        assert_mismatch(outcome, &["1010", "1011"]);
        assert_eq!(received, [7.0f32; 1011]);
    });
    suite.check_fresh("dtypes differ", |comm| {
        let (sent, mut received) = (vec![1.0f32; 10], vec![f16::ONE; 10]);
        let outcome = match rank {
            0 => comm.send(&sent, 1),
            1 => comm.recv(&mut received, 0),
            _ => comm.barrier(),
        };
        assert_mismatch(outcome, &["f32", "f16"]);
    });
    // Every transfer matches except the one into rank 0: each rank moves the data that it can, and no rank hangs.
    suite.check_fresh("one direction of a ring differs", |comm| {
        let (to, from) = neighbours(&comm);
        let sent = vec![1.0f32; 40_000];
        let mut received = vec![7.0f32; if rank == 0 { 40_001 } else { 40_000 }];
        let outcome = comm.send_recv(&sent, to, &mut received, from);
        assert_mismatch(outcome.and_then(|()| comm.barrier()), &["40000", "40001"]);
    });
    suite.check_fresh("two ranks send to each other", |comm| {
        let sent = vec![1.0f32; 10];
        let outcome = if rank < 2 { comm.send(&sent, 1 - rank) } else { comm.barrier() };
        assert_mismatch(outcome, &["rank 0 called send", "rank 1 called send"]);
    });
}
