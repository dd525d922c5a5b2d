//! [`DataParallelOptions`]: the options of [`DataParallel`](crate::DataParallel).

use gradsync::train::{ReducerOptions, Reduction, Start};

/// The options of [`DataParallel::new`](crate::DataParallel::new), which also takes a [`Reduction`] or [`ReducerOptions`] in their place.
///
/// ```
/// use gradsync::train::{Reduction, Start};
/// use gradsync_candle::DataParallelOptions;
///
/// // All ranks have read one checkpoint; other weights on one of them are an error.
/// let options = DataParallelOptions::from(Reduction::Mean).with_start(Start::Compare);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct DataParallelOptions {
    /// The options of the reduction of gradients.
    pub reducer: ReducerOptions,
    /// How the ranks' variables become equal: by default every rank takes rank 0's, [`Start::Broadcast`].
    pub start: Start,
}

impl DataParallelOptions {
    /// The same options with this [`reducer`](Self::reducer).
    #[must_use]
    pub fn with_reducer(self, reducer: impl Into<ReducerOptions>) -> Self {
        Self { reducer: reducer.into(), ..self }
    }

    /// The same options with this [`start`](Self::start).
    #[must_use]
    pub fn with_start(self, start: Start) -> Self {
        Self { start, ..self }
    }
}

impl From<ReducerOptions> for DataParallelOptions {
    fn from(reducer: ReducerOptions) -> Self {
        Self { reducer, ..Self::default() }
    }
}

impl From<Reduction> for DataParallelOptions {
    fn from(reduction: Reduction) -> Self {
        ReducerOptions::from(reduction).into()
    }
}
