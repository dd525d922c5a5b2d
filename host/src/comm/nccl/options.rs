//! [`NcclOptions`]: the options of a communicator.

use std::time::Duration;

use crate::bootstrap::DEFAULT_DEADLINE;
use crate::bootstrap::call_deadline;
use crate::call::setters;

/// Choices of an NCCL communicator.
///
/// ```
/// use std::time::Duration;
///
/// use gradsync::comm::nccl::NcclOptions;
///
/// let options = NcclOptions::default().with_deadline(Duration::from_secs(60)).with_min_ctas(Some(8));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NcclOptions {
    /// The time limit of set-up, and of each operation from its call to its end, including the earlier work in its queue.
    /// `GRADSYNC_DEADLINE` (in seconds) or 10 minutes by default.
    pub deadline: Duration,
    /// Whether ranks compare every call with each other (see the [module](super#checks)), so that a mismatch is an error that names two
    /// ranks' calls, instead of a hang or a wrong result. On by default; must be equal on all ranks. Calls by which NCCL could write
    /// beyond the memory of a peer are compared in any case ([without checks](super#without-checks)).
    pub checks: bool,
    /// Whether calls of NCCL may block the host (see the [module](super)). True by default.
    pub blocking: bool,
    /// The fewest thread blocks of NCCL's kernels, each of which occupies a multiprocessor (`minCTAs` of `ncclConfig_t`); with `None`,
    /// the default, NCCL chooses. NCCL lowers values beyond its limit, and `NCCL_MIN_CTAS` and `NCCL_MAX_CTAS` in the environment
    /// override both options. Must be equal on all ranks.
    pub min_ctas: Option<u32>,
    /// The most thread blocks (`maxCTAs`), with the same rules.
    pub max_ctas: Option<u32>,
    /// Whether several ranks may use one GPU, which is refused otherwise: for tests of many ranks with few GPUs. False by default; must
    /// be equal on all ranks (see [many ranks on one GPU](super#many-ranks-on-one-gpu)).
    pub shared_gpu: bool,
    /// The largest all-reduce that is one launch of this crate's kernels, in bytes, where they can access the memory of all ranks (see
    /// [small sums](super#small-sums)): at most 64 MiB. With `None`, the default, 8 MiB if all GPUs have compute capability 9.x,
    /// otherwise 256 KiB, where that was measured to be faster than NCCL; 0 leaves all sums to NCCL. Must be equal on all ranks.
    pub low_latency_bytes: Option<usize>,
    /// The largest of these all-reduces in which every rank sends all data to all others (one shot), in bytes. With `None`, the default,
    /// 2 MiB on two ranks, 256 KiB on three and four, 128 KiB on more, as measured. At most twice `low_latency_bytes`, divided by the number of ranks; more means this
    /// number. Must be equal on all ranks.
    pub one_shot_bytes: Option<usize>,
}

/// The limit of [`NcclOptions::low_latency_bytes`].
const MOST_LOW_LATENCY_BYTES: usize = 64 << 20;

impl Default for NcclOptions {
    fn default() -> Self {
        Self {
            // The join of the ranks has refused an invalid variable.
            deadline: call_deadline().unwrap_or(DEFAULT_DEADLINE),
            checks: true,
            blocking: true,
            min_ctas: None,
            max_ctas: None,
            shared_gpu: false,
            low_latency_bytes: None,
            one_shot_bytes: None,
        }
    }
}

impl NcclOptions {
    setters! {
        with_deadline(deadline: Duration),
        with_checks(checks: bool),
        with_blocking(blocking: bool),
        with_min_ctas(min_ctas: Option<u32>),
        with_max_ctas(max_ctas: Option<u32>),
        with_shared_gpu(shared_gpu: bool),
        with_low_latency_bytes(low_latency_bytes: Option<usize>),
        with_one_shot_bytes(one_shot_bytes: Option<usize>),
    }

    /// The reason why the options are invalid, if they are.
    pub(super) fn invalid_reason(&self) -> Option<String> {
        for (name, ctas) in [("min_ctas", self.min_ctas), ("max_ctas", self.max_ctas)] {
            if let Some(ctas) = ctas.filter(|&ctas| ctas == 0 || i32::try_from(ctas).is_err()) {
                return Some(format!("{name} is {ctas}, and must be from 1 to {}", i32::MAX));
            }
        }
        if let Some(bytes) = self.low_latency_bytes.filter(|&bytes| bytes > MOST_LOW_LATENCY_BYTES) {
            return Some(format!("low_latency_bytes is {bytes}, and at most {MOST_LOW_LATENCY_BYTES} are possible"));
        }
        let (min, max) = (self.min_ctas?, self.max_ctas?);
        (min > max).then(|| format!("min_ctas is {min}, which is more than max_ctas, {max}"))
    }
}
