//! Which operation of this crate the caller of a thread is in, so that errors can name it and not the steps that it is made of.
//!
//! It is kept by thread: an operation makes all its calls of communicators on the thread that called it, and communicators of any crate may
//! stand between the two. Nothing here changes what a call does.

use std::cell::Cell;
use std::marker::PhantomData;

use super::Operation;

#[derive(Clone, Copy)]
struct Scope {
    /// What the caller has called.
    operation: Option<Operation>,
    /// Whether ranks compare what they are about to do.
    is_comparing: bool,
}

impl Scope {
    const NONE: Self = Self { operation: None, is_comparing: false };
}

thread_local! {
    static CURRENT: Cell<Scope> = const { Cell::new(Scope::NONE) };
}

/// Restores the scope from before when dropped, on the same thread.
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

fn enter(scope: Scope) -> Entered {
    Entered { before: CURRENT.replace(scope), one_thread: PhantomData }
}

/// What is called from here on is a step of this operation. Inside another operation it is a step of that one, which is what the caller knows.
pub(crate) fn within(operation: Operation) -> Entered {
    let scope = CURRENT.get();
    enter(Scope { operation: scope.operation.or(Some(operation)), ..scope })
}

/// What is gathered from here on is a comparison of calls, which fits nothing but another one.
pub(crate) fn comparing() -> Entered {
    enter(Scope { is_comparing: true, ..CURRENT.get() })
}

/// What is called from here on is called by code of the caller's, which an operation runs.
pub(crate) fn outside() -> Entered {
    enter(Scope::NONE)
}

/// The operation that the caller has called, if this is a step of one.
pub(crate) fn operation() -> Option<Operation> {
    CURRENT.get().operation
}

/// What errors of `operation` on this thread name: the operation that the caller has called.
pub(crate) fn called(operation: Operation) -> Operation {
    CURRENT.get().operation.unwrap_or(operation)
}

/// What a call of `operation` is, said of a gathering where ranks compare calls.
pub(super) fn step(operation: Operation) -> Operation {
    let is_gathering = matches!(operation, Operation::AllGather | Operation::Exchange);
    if is_gathering && CURRENT.get().is_comparing { Operation::Comparison } else { operation }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Call;

    #[test]
    fn the_outermost_operation_counts_until_it_ends() {
        assert_eq!(Call::without_data(Operation::Barrier).within, None);
        {
            let _step = within(Operation::TrainingStep);
            let _inner = within(Operation::Split);
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
        assert_eq!(operation(), None);
    }
}
