//! The control channel of an MPI job: it is created over MPI alone, and supports everything that a channel from a rendezvous supports.

use std::time::Duration;

use gradsync::Error;
use gradsync::comm::{Call, CommError, Operation, Ranks, ReduceOp, Split};
use gradsync::dtype::DType;
use gradsync::internal::MemberCalls;
use gradsync_tests::suite::{Suite, processes};

use crate::transport::Job;

const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) fn run(suite: &mut Suite<Job>) {
    let (rank, world_size) = (suite.rank(), suite.world_size());
    suite.check("a control channel", |comm| {
        let member = comm.member(DEADLINE).unwrap();
        assert_eq!((member.rank(), member.world_size()), (rank, world_size));
        let names = member.all_gather(format!("rank {rank}").as_bytes(), DEADLINE).unwrap();
        let expected: Vec<Vec<u8>> = (0..world_size).map(|rank| format!("rank {rank}").into_bytes()).collect();
        assert_eq!(names, expected);
        let call = Call::new(Operation::AllReduce(ReduceOp::Sum), 1010, DType::BF16);
        member.agree(&[call], DEADLINE).unwrap();
        // MPI communicators still work beside the control channel.
        comm.barrier().unwrap();
        let other = Call::new(call.operation, 1010 + usize::from(rank == 1), DType::BF16);
        let error = member.agree(&[other], DEADLINE).expect_err("lengths differ");
        assert!(matches!(error, CommError::Mismatch { .. }), "{error:?}");
    });
    suite.check("two control channels at once", |comm| {
        let members = [(); 2].map(|()| comm.member(DEADLINE).unwrap());
        for member in members.iter().rev() {
            assert_eq!(member.all_gather(&[rank as u8], DEADLINE).unwrap().len(), world_size);
        }
        drop(members);
        comm.barrier().unwrap();
    });
    suite.check("control channels of groups", |comm| {
        let part = comm.split(Some((rank % 2) as u64), 0).unwrap().expect("a colour");
        let member = part.member(DEADLINE).unwrap();
        assert_eq!((member.rank(), member.world_size()), (part.rank(), part.world_size()));
        let ranks = member.all_gather(&[rank as u8], DEADLINE).unwrap();
        let expected: Vec<Vec<u8>> =
            (0..world_size).filter(|other| other % 2 == rank % 2).map(|r| vec![r as u8]).collect();
        assert_eq!(ranks, expected);
    });
    suite.check_fresh("a control channel meets a split", |comm| {
        let outcome = if rank == 0 { comm.member(DEADLINE).map(drop) } else { comm.split(None, 0).map(drop) };
        let error = outcome.expect_err("the calls differ");
        assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error:?}");
    });
    suite.check("one line joins", |_| processes::join());
    suite.done("member");
}
