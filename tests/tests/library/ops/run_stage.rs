//! Pipelines between threads: one forward and one backward pass in turn, many micro-batches at once, and work that fails.

use gradsync::comm::{Ranks, local};
use gradsync::ops::send_recv::{
    Bundle, Expected, Payload, RankSchedule, Received, SendRecv, Stage, StageWork, TransferHandler, run_schedule,
    run_stage,
};
use gradsync::{CommError, Error, Result};
use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::transfers::{HostRank, pipeline};

#[test]
fn one_forward_one_backward_of_every_size() {
    guarded(120, || {
        for stages in 1..=6 {
            on_ranks(stages, |comm| pipeline(&HostRank(&comm)));
        }
    });
}

/// Pipeline work with empty payloads that refuses one payload.
struct Refuses(Payload);

impl Refuses {
    fn check(&self, what: Payload) -> Result<()> {
        if self.0 == what {
            return Err(Error::InvalidArgument { operation: "work", reason: format!("{what:?} is refused") });
        }
        Ok(())
    }
}

impl TransferHandler<Payload> for Refuses {
    fn send(&self, _: usize, payload: &Payload) -> Result<Bundle<'_>> {
        self.check(*payload)?;
        Bundle::new([&[1u8][..]])
    }

    fn expect(&self, _: usize, _: &Payload) -> Result<Expected> {
        Ok(Expected::known([(gradsync::DType::U8, vec![1])]))
    }

    fn received(&mut self, _: usize, _: &Payload, tensors: Received) -> Result<()> {
        assert_eq!(tensors.tensor(0).data().as_bytes(), [1]);
        Ok(())
    }
}

impl StageWork for Refuses {
    fn forward(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn backward(&mut self, micro_batch: usize) -> Result<()> {
        self.check(Payload::Gradient(micro_batch))
    }
}

/// The rank with the failing work gets its own error, and no other rank waits for ever.
#[test]
fn work_that_fails_ends_the_pipeline() {
    guarded(60, || {
        let outcomes = on_ranks(3, |comm| {
            let refused = if comm.rank() == 1 { Payload::Activation(2) } else { Payload::Activation(99) };
            let stage = Stage::one_forward_one_backward(comm.rank(), 3, 4).unwrap();
            run_stage(&SendRecv::new(&comm), &stage, &mut Refuses(refused))
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            match (rank, outcome.expect_err("a stage failed")) {
                (1, Error::InvalidArgument { reason, .. }) => assert_eq!(reason, "Activation(2) is refused"),
                (_, Error::Comm(CommError::PeerGone { .. })) => {}
                (rank, other) => panic!("rank {rank}: {other:?}"),
            }
        }
    });
}

/// A part of a schedule without counterpart ends at the deadline, and a peer with another part is named at once.
#[test]
fn parts_that_do_not_fit_do_not_hang() {
    guarded(60, || {
        struct Nothing;
        impl TransferHandler<usize> for Nothing {
            fn send(&self, _: usize, _: &usize) -> Result<Bundle<'_>> {
                Bundle::new([&[0u8; 4][..]])
            }
            fn expect(&self, _: usize, payload: &usize) -> Result<Expected> {
                Ok(Expected::known([(gradsync::DType::U8, vec![*payload])]))
            }
            fn received(&mut self, _: usize, _: &usize, _: Received) -> Result<()> {
                Ok(())
            }
        }
        let group = local::group_with_deadline(2, std::time::Duration::from_secs(1)).unwrap();
        let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = group
                .into_iter()
                .map(|comm| {
                    scope.spawn(move || {
                        let mut part = RankSchedule::new(comm.rank(), 2).unwrap();
                        part.recv(0, 1 - comm.rank(), 4usize).unwrap();
                        run_schedule(&SendRecv::new(&comm), &part, &mut Nothing)
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for outcome in outcomes {
            assert!(matches!(outcome, Err(Error::Comm(_))), "{outcome:?}");
        }
    });
}
