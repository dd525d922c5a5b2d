//! The traits and names of a first program: `use gradsync::prelude::*;`.
//!
//! ```
//! use gradsync::prelude::*;
//!
//! let losses = local::run(4, |comm| {
//!     let mut weights = GradientBuffer::new(DType::F32, comm.world_size(), [("weight", [8])])?;
//!     let mut gradients = GradientBuffer::new(DType::F32, comm.world_size(), [("weight", [8])])?;
//!     let mut sgd = Sgd::new(0.1)?;
//!     for (_, tensor) in &mut gradients {
//!         tensor.data_mut::<f32>().fill(comm.rank() as f32); // instead of a backward pass
//!     }
//!     ops::all_reduce(&comm, &mut gradients, ReduceOp::Mean)?;
//!     sgd.step(&mut weights, &gradients)?;
//!     comm.all_reduce_scalar(comm.rank() as f32, ReduceOp::Mean)
//! })?;
//! assert_eq!(losses, [1.5; 4]);
//! # Ok::<(), Error>(())
//! ```
//!
//! | names | contents |
//! |---|---|
//! | [`Ranks`], [`Communicator`], [`Collectives`], [`Split`] | the traits of [`comm`](crate::comm), whose methods are the calls of a communicator |
//! | [`DeltaOptimizer`], [`Sgd`] | the trait of optimizers, and one of them |
//! | [`local`] | ranks as threads |
//! | [`ops`], [`train`] | the modules, for operations and training steps by their names there |
//! | [`accumulate`], [`adasum`], [`adasum_all_reduce`], [`zero_gradient`] | operations of every loop |
//! | [`GradientBuffer`], [`DType`], [`ReduceOp`], [`AdasumOptions`], [`Error`] | their arguments and errors |

pub use crate::buffer::GradientBuffer;
pub use crate::comm::{Collectives, Communicator, Ranks, ReduceOp, Split, local};
#[doc(no_inline)]
pub use crate::dtype::DType;
pub use crate::error::Error;
pub use crate::ops::{self, AdasumOptions, accumulate, adasum, adasum_all_reduce, zero_gradient};
pub use crate::train::{self, DeltaOptimizer, Sgd};
