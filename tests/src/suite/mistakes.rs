//! The text of each mistake of ranks: the same on all ranks, and over every transport.

use std::thread::sleep;
use std::time::Duration;

use gradsync::Result;
use gradsync::comm::{Call, Collectives, Communicator, Departure, Operation, ReduceOp};
use gradsync::dtype::DType;

use super::failures::depart;
use super::{DEADLINE, Suite, Transport};
use crate::array::Array;
use crate::oracle::Format;

/// The deadline of ranks that a rank keeps waiting.
pub const SHORT: Duration = Duration::from_millis(200);
/// The time after which a late rank makes its call.
pub const LATE: Duration = Duration::from_millis(700);

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// It waits for all ranks.
    Barrier,
    /// A sum of so many elements of this type.
    Sum(usize, DType),
    /// A send of so many elements to a rank.
    Send(usize, usize),
    /// A receive of so many elements of this type from a rank.
    Recv(usize, usize, DType),
    /// It waits for all ranks after the deadline of the others.
    Late,
    /// It leaves.
    Leave,
    /// It panics.
    Panic,
}

/// A mistake: the deed of each rank, and the text of the error.
pub struct Mistake {
    /// The name of the case.
    pub name: &'static str,
    /// The deed of a rank among ranks of which this is the last one.
    pub deed: fn(rank: usize, last: usize) -> Deed,
    /// The text of the error of every rank that makes a call. It may name any rank below the last one, since which call is compared with the
    /// last rank's depends on the order in which they are made.
    pub text: fn(usual: usize, last: usize) -> String,
}

/// Every kind of mistake.
pub const MISTAKES: [Mistake; 10] = [
    Mistake {
        name: "lengths of a collective differ",
        deed: |rank, last| Deed::Sum(1010 + usize::from(rank == last), DType::F32),
        text: |usual, last| {
            format!(
                "ranks disagree: rank {usual} called all_reduce(sum) of 1010 × f32, \
                 rank {last} called all_reduce(sum) of 1011 × f32"
            )
        },
    },
    Mistake {
        name: "dtypes of a collective differ",
        deed: |rank, last| Deed::Sum(5, if rank == last { DType::BF16 } else { DType::F32 }),
        text: |usual, last| {
            format!(
                "ranks disagree: rank {usual} called all_reduce(sum) of 5 × f32, rank {last} called all_reduce(sum) of 5 × bf16"
            )
        },
    },
    Mistake {
        name: "operations differ",
        deed: |rank, last| if rank == last { Deed::Barrier } else { Deed::Sum(5, DType::F32) },
        text: |usual, last| {
            format!("ranks disagree: rank {usual} called all_reduce(sum) of 5 × f32, rank {last} called barrier")
        },
    },
    Mistake {
        name: "a rank is missing",
        deed: |rank, last| if rank == last { Deed::Late } else { Deed::Barrier },
        text: |_, last| format!("barrier: ranks [{last}] did not arrive within {SHORT:?}"),
    },
    Mistake {
        name: "a rank has left",
        deed: |rank, last| if rank == last { Deed::Leave } else { Deed::Barrier },
        text: |_, last| format!("barrier: rank {last} left"),
    },
    Mistake {
        name: "a rank has panicked",
        deed: |rank, last| if rank == last { Deed::Panic } else { Deed::Barrier },
        text: |_, last| format!("barrier: rank {last} panicked"),
    },
    Mistake {
        name: "two ranks send to each other",
        deed: |rank, _| if rank < 2 { Deed::Send(10, 1 - rank) } else { Deed::Barrier },
        text: |_, _| {
            "ranks disagree: rank 0 called send(to rank 1) of 10 × f32, rank 1 called send(to rank 0) of 10 × f32"
                .into()
        },
    },
    Mistake {
        name: "a collective and a transfer wait for each other",
        deed: |rank, _| if rank == 1 { Deed::Send(10, 0) } else { Deed::Barrier },
        text: |_, _| "ranks disagree: rank 0 called barrier, rank 1 called send(to rank 0) of 10 × f32".into(),
    },
    Mistake {
        name: "lengths of a transfer differ",
        deed: |rank, _| match rank {
            0 => Deed::Send(1010, 1),
            1 => Deed::Recv(1011, 0, DType::F32),
            _ => Deed::Barrier,
        },
        text: |_, _| {
            "ranks disagree: rank 0 called send(to rank 1) of 1010 × f32, rank 1 called recv(from rank 0) of 1011 × f32"
                .into()
        },
    },
    Mistake {
        name: "dtypes of a transfer differ",
        deed: |rank, _| match rank {
            0 => Deed::Send(10, 1),
            1 => Deed::Recv(10, 0, DType::BF16),
            _ => Deed::Barrier,
        },
        text: |_, _| {
            "ranks disagree: rank 0 called send(to rank 1) of 10 × f32, rank 1 called recv(from rank 0) of 10 × bf16"
                .into()
        },
    },
];

impl Deed {
    /// The call that ranks compare; none for a rank that makes no call.
    pub fn call(self) -> Option<Call> {
        match self {
            Deed::Barrier | Deed::Late => Some(Call::without_data(Operation::Barrier)),
            Deed::Sum(len, dtype) => Some(Call::new(Operation::AllReduce(ReduceOp::Sum), len, dtype)),
            Deed::Send(len, peer) => Some(Call::new(Operation::Send { peer }, len, DType::F32)),
            Deed::Recv(len, peer, dtype) => Some(Call::new(Operation::Recv { peer }, len, dtype)),
            Deed::Leave | Deed::Panic => None,
        }
    }

    fn run(self, comm: &dyn Communicator) -> Result<()> {
        let array = |len, dtype| Array::unwritten(if dtype == DType::BF16 { Format::BF16 } else { Format::F32 }, len);
        match self {
            Deed::Sum(len, dtype) => comm.all_reduce(array(len, dtype).slice_mut(), ReduceOp::Sum),
            Deed::Send(len, peer) => comm.send(array(len, DType::F32).slice(), peer),
            Deed::Recv(len, peer, dtype) => comm.recv(array(len, dtype).slice_mut(), peer),
            Deed::Barrier | Deed::Late | Deed::Leave | Deed::Panic => comm.barrier(),
        }
    }
}

impl Mistake {
    /// Asserts that a rank of several got an error with this mistake's text.
    ///
    /// # Panics
    /// If the rank got no error, or one with another text.
    #[track_caller]
    pub fn assert_text<T, E: std::fmt::Display>(&self, outcome: std::result::Result<T, E>, last: usize) {
        let Err(error) = outcome else { panic!("{}: no error", self.name) };
        let (text, mut texts) = (error.to_string(), (0..last).map(|usual| (self.text)(usual, last)));
        assert!(
            texts.any(|expected| text == expected),
            "{}: {text:?} instead of {:?}",
            self.name,
            (self.text)(0, last)
        );
    }
}

/// All cases, for at least two ranks.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    let (rank, last) = (suite.rank(), suite.world_size() - 1);
    for mistake in MISTAKES {
        let (deed, odd) = ((mistake.deed)(rank, last), (mistake.deed)(last, last));
        if odd == Deed::Leave && !T::TELLS_OF_LEAVING {
            continue;
        }
        let deadline = if odd == Deed::Late { SHORT } else { DEADLINE };
        suite.check_within(deadline, &format!("the text where {}", mistake.name), |comm| match deed {
            Deed::Leave => depart(comm, Departure::Left),
            Deed::Panic => depart(comm, Departure::Panicked),
            deed => {
                if deed == Deed::Late {
                    sleep(LATE);
                }
                mistake.assert_text(deed.run(&comm), last);
            }
        });
    }
    suite.done("mistakes");
}
