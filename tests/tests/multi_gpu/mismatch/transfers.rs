//! Sends and receives without counterpart. Ranks without a part in them learn of it as well.

use std::time::Instant;

use gradsync::comm::{Call, Collectives, Communicator, Operation, Ranks};
use gradsync::driver::DeviceSlice;
use gradsync::{CommError, DType, Error};

use super::{Groups, QUICK, SUM, comm_error, f32s};
use crate::report::Report;

pub(super) fn run(groups: &mut Groups<'_>, report: &mut Report) {
    let call = |operation, len| Call::new(operation, len, DType::F32);
    let (send, receive) = (|peer| Operation::Send { peer }, |peer| Operation::Recv { peer });
    report.case("two sends", || {
        meet(groups, [call(send(1), 5), call(send(0), 5)]);
    });
    report.case("two receives", || {
        meet(groups, [call(receive(1), 5), call(receive(0), 5)]);
    });
    report.case("transfers of other lengths", || {
        meet(groups, [call(send(1), 5), call(receive(0), 6)]);
    });
    report.case("transfers of other types, which NCCL moves as the same bytes", || {
        meet(groups, [Call::new(send(1), 6, DType::I16), Call::new(receive(0), 6, DType::U16)]);
        meet(groups, [Call::new(send(1), 6, DType::Bool), Call::new(receive(0), 6, DType::U8)]);
    });
    report.case("no peer", || {
        // The refusal breaks nothing: no other rank waits for such a transfer.
        let (comm, queue) = (groups.comm.as_ref().expect("a communicator"), groups.queue());
        for peer in [comm.rank(), comm.world_size()] {
            for outcome in [
                comm.send(f32s(queue, 5).as_slice(), peer),
                comm.recv(f32s(queue, 5).as_mut_slice(), peer),
                crate::transfers::exchange(comm, vec![(peer, f32s(queue, 5).as_slice())], vec![]),
            ] {
                let is_named = matches!(
                    &outcome,
                    Err(Error::Comm(CommError::InvalidPeer { peer: found, rank, world_size, .. }))
                        if (*found, *rank, *world_size) == (peer, comm.rank(), comm.world_size())
                );
                assert!(is_named, "a transfer with rank {peer} gave {outcome:?}");
            }
        }
        assert!(comm.failure().is_none());
        SUM(comm, queue).unwrap();
        comm.synchronize(queue).unwrap();
        // The next case breaks this communicator on purpose, which must not overtake the call above on a slower rank.
        comm.barrier().unwrap();
    });
}

/// Ranks 0 and 1 make these calls, and the others make none.
fn meet(groups: &mut Groups<'_>, calls: [Call; 2]) {
    let (rank, queue) = (groups.rank(), groups.queue().clone());
    let expected = CommError::Mismatch { left_rank: 0, left: calls[0].into(), right_rank: 1, right: calls[1].into() };
    let failure = groups.fail(|comm| {
        let Some(own) = calls.get(rank) else { return };
        let data = f32s(&queue, own.len);
        let (address, dtype) = (data.as_slice().address(), own.dtype.expect("a transfer has data"));
        // SAFETY: the memory has room for as many elements of each type.
        let raw = unsafe { DeviceSlice::from_raw_parts(&queue, address, dtype, own.len) };
        let (sends, receives) = match own.operation {
            Operation::Send { peer } => (vec![(peer, raw)], vec![]),
            Operation::Recv { peer } => (vec![], vec![(peer, raw)]),
            other => panic!("{other} is no transfer"),
        };
        let begun = Instant::now();
        // SAFETY: the memory lives until the communicator has failed, and nothing else uses it.
        let outcome = unsafe { crate::transfers::exchange_raw(comm, &sends, &receives) };
        let outcome = outcome.and_then(|()| comm.synchronize(&queue));
        let error = comm_error(outcome.expect_err("nobody meets this call"));
        assert_eq!(error, expected);
        assert!(begun.elapsed() < QUICK, "{error}: only after {:?}", begun.elapsed());
    });
    assert_eq!(failure, expected);
}
