//! [`MpiError`]: the errors of using MPI outside collectives.

/// The reason why MPI cannot be used, or the error that it returned.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// The process has finalised MPI, after which it cannot be used again (MPI-4.1, 11.2.2).
    #[error("MPI has been finalised in this process")]
    Finalised,
    /// MPI was initialised with less thread support than this crate needs.
    #[error(
        "MPI was initialised with {found}, and at least MPI_THREAD_SERIALIZED is needed: let `MpiCommunicator::world` initialise it, \
         or ask for `Threading::Serialized` or `Threading::Multiple`"
    )]
    ThreadLevel {
        /// The level of this process, by MPI's name.
        found: &'static str,
    },
    /// The communicator connects two groups, and a collective of this crate runs in one.
    #[error(
        "this is an intercommunicator, and collectives need an intracommunicator, such as MPI_Intercomm_merge makes"
    )]
    Intercommunicator,
    /// A rank did not arrive in time when this communicator was duplicated before. MPI still waits for that rank, and cannot make a
    /// second duplicate meanwhile.
    #[error(
        "a duplicate of this communicator was given up at its deadline, and MPI can make no other one in this job; communicators that the \
         ranks already have still work, and can be split"
    )]
    GivenUp,
    /// Every group that is split off needs its own tags, and MPI has no more.
    #[error("MPI has no tags left for another group: {highest} is the highest")]
    OutOfTags {
        /// The highest tag of this MPI.
        highest: i32,
    },
    /// The launcher has started other ranks than MPI knows.
    #[error(
        "the launcher says rank {} of {}, and MPI says rank {} of {}: start the program with the mpirun of the MPI library that it is \
         linked with",
        launched.0, launched.1, found.0, found.1
    )]
    OtherRanks {
        /// The rank and the world size of the launcher's variables.
        launched: (usize, usize),
        /// The rank and the world size in MPI.
        found: (usize, usize),
    },
    /// MPI returned an error code.
    #[error("{call} failed with code {code}: {text}")]
    Refused {
        /// The MPI function.
        call: &'static str,
        /// Its code.
        code: i32,
        /// The text of `MPI_Error_string`.
        text: String,
    },
}

debug_as_text!(MpiError);
