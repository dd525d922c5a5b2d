//! Payloads of more bytes than MPI can count in one message. Runs only where `GRADSYNC_MPI_LARGE` is set, on two ranks: each needs 2.2 GB.

use gradsync::comm::{Collectives, Communicator, ReduceOp};
use gradsync::{Slice, SliceMut, f16};
use gradsync_tests::suite::Suite;

use crate::transport::Job;

/// The payload has 2.2e9 bytes, more than 2³¹.
const LEN: usize = 1_100_000_000;
/// The period of the values in elements, which is no divisor of a power of two.
const PERIOD: usize = 7 * 9 * 1009;

fn period(value: impl Fn(usize) -> usize) -> Vec<f16> {
    (0..PERIOD).map(|i| f16::from_f32(value(i) as f32)).collect()
}

fn fill(data: &mut [f16], period: &[f16]) {
    data.chunks_mut(PERIOD).for_each(|chunk| chunk.copy_from_slice(&period[..chunk.len()]));
}

#[track_caller]
fn assert_periodic(data: &[f16], period: &[f16]) {
    let wrong = data.chunks(PERIOD).position(|chunk| chunk != &period[..chunk.len()]);
    assert_eq!(wrong, None, "the first period with a wrong element");
}

pub(crate) fn run(suite: &mut Suite<Job>) {
    let rank = suite.rank();
    if std::env::var_os("GRADSYNC_MPI_LARGE").is_none() {
        return;
    }
    assert_eq!(suite.world_size(), 2, "GRADSYNC_MPI_LARGE is for two ranks");
    let (first, second) = (period(|i| i % 1009), period(|i| i % 9));
    let mut data = vec![f16::ZERO; LEN];
    suite.check("1.1e9 f16 sent", |comm| {
        if rank == 0 {
            fill(&mut data, &first);
            comm.send(&data, 1).unwrap();
        } else {
            comm.recv(&mut data, 0).unwrap();
            assert_periodic(&data, &first);
        }
    });
    suite.done("large send");
    suite.check("2.2e9 bytes exchanged, with a short message on either side", |comm| {
        let (sent, mut got) = ([rank as u8; 5], [0x77; 5]);
        if rank == 0 {
            fill(&mut data, &second);
            let long = Slice::from(&data).as_bytes();
            comm.exchange(&[(1, (&sent).into()), (1, long.into())], &mut [(1, (&mut got).into())]).unwrap();
        } else {
            let long = SliceMut::from(&mut data).as_bytes_mut();
            comm.exchange(&[(0, (&sent).into())], &mut [(0, (&mut got).into()), (0, long.into())]).unwrap();
            assert_periodic(&data, &second);
        }
        assert_eq!(got, [1 - rank as u8; 5]);
    });
    suite.done("large exchange");
    suite.check("1.1e9 f16 broadcast", |comm| {
        if rank == 1 {
            fill(&mut data, &second);
        }
        comm.broadcast(&mut data, 1).unwrap();
        assert_periodic(&data, &second);
    });
    suite.done("large broadcast");
    suite.check("1.1e9 f16 reduced", |comm| {
        if rank == 0 {
            fill(&mut data, &first);
        }
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_periodic(&data, &period(|i| i % 1009 + i % 9));
    });
    suite.done("large all_reduce");
}
