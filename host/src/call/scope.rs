//! The scope of a thread: the operation of this crate that the thread's caller has called, so that errors can name it instead of its
//! steps.
//!
//! The scope is thread-local: an operation makes all its calls of communicators on the thread that called it, and communicators of any
//! crate may stand between the two. The scope does not change the effect of a call.

use std::cell::Cell;
use std::marker::PhantomData;

use super::Operation;

#[derive(Clone, Copy)]
struct Scope {
    /// The operation that the caller has called.
    operation: Option<Operation>,
    /// Whether ranks are comparing their calls.
    is_comparing: bool,
    /// The number of tensors of that operation, if it has several.
    tensors: Option<usize>,
}

impl Scope {
    const NONE: Self = Self { operation: None, is_comparing: false, tensors: None };
}

thread_local! {
    static CURRENT: Cell<Scope> = const { Cell::new(Scope::NONE) };
}

/// Restores the previous scope when dropped, on the same thread.
#[must_use = "the scope ends when this is dropped"]
pub(crate) struct Entered {
    before: Scope,
    one_thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

impl Entered {
    /// Sets the number of tensors of the operation, unless an outer operation has set its own.
    pub(crate) fn with_tensors(self, tensors: usize) -> Self {
        let scope = CURRENT.get();
        CURRENT.set(Scope { tensors: scope.tensors.or(Some(tensors)), ..scope });
        self
    }
}

fn enter(scope: Scope) -> Entered {
    Entered { before: CURRENT.replace(scope), one_thread: PhantomData }
}

/// Makes all following calls steps of this operation. Inside another operation they are steps of the outer one, because the caller knows
/// only that one.
pub(crate) fn within(operation: Operation) -> Entered {
    let scope = CURRENT.get();
    enter(Scope { operation: scope.operation.or(Some(operation)), ..scope })
}

/// Makes all following gathers comparisons of calls, which match only other comparisons.
pub(crate) fn comparing() -> Entered {
    enter(Scope { is_comparing: true, ..CURRENT.get() })
}

/// Attributes all following calls to the caller's own code, which an operation runs.
pub(crate) fn outside() -> Entered {
    enter(Scope::NONE)
}

/// The number of tensors of the operation that the caller has called, if it has several.
pub(crate) fn tensors() -> Option<usize> {
    CURRENT.get().tensors
}

/// The operation that the caller has called, if this is a step of one.
pub(crate) fn operation() -> Option<Operation> {
    CURRENT.get().operation
}

/// The operation that errors of `operation` on this thread name: the outermost one, which the caller has called.
pub(crate) fn called(operation: Operation) -> Operation {
    CURRENT.get().operation.unwrap_or(operation)
}

/// Replaces a gather for a comparison of calls by [`Operation::Comparison`].
pub(super) fn step(operation: Operation) -> Operation {
    let is_gathering = matches!(operation, Operation::AllGather | Operation::Exchange);
    if is_gathering && CURRENT.get().is_comparing { Operation::Comparison } else { operation }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Call;

    #[test]
    fn within_keeps_the_outermost_operation_until_it_ends() {
        assert_eq!(Call::without_data(Operation::Barrier).within, None);
        {
            let _step = within(Operation::TrainingStep).with_tensors(7);
            let _inner = within(Operation::Split).with_tensors(1);
            assert_eq!(tensors(), Some(7));
            let gathering = {
                let _comparing = comparing();
                Call::without_data(Operation::AllGather)
            };
            assert_eq!((gathering.within, gathering.operation), (Some(Operation::TrainingStep), Operation::Comparison));
            {
                let _outside = outside();
                let _own = within(Operation::Groups);
                assert_eq!(operation(), Some(Operation::Groups));
            }
            let call = Call::without_data(Operation::AllGather);
            assert_eq!((call.called(), call.operation), (Operation::TrainingStep, Operation::AllGather));
        }
        assert_eq!((operation(), tensors()), (None, None));
    }
}
