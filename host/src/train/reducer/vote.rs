//! The vote at the end of a step: each rank describes its step to the others, and all come to one conclusion.

use super::options::{AbsentGradients, NonFinite};
use super::report::{GradientState, NonFiniteGradient};
use super::step::{Progress, Step};
use super::{OPERATION, Order, Reducer, ReducerMemory};
use crate::call_comparison::{ComparedCall, agree, gather};
use crate::error::{Error, Result};
use crate::train::Reduction;

/// Bits of the first word.
const REFUSES: u64 = 1;
const HAS_DATA: u64 = 2;
/// In place of a parameter: there is none.
const NONE: u64 = u64::MAX;
/// The words before the list of gradients.
const HEAD: usize = 3;

/// A rank's vote: flags; the number of a parameter whose gradient is not finite, and its step; a bit for each gradient that the rank had;
/// and in the first step the order of these gradients.
struct Vote<'a>(&'a [u64]);

impl Vote<'_> {
    /// The vote of a rank whose gradients are all in.
    fn words(progress: &Progress, with_order: bool) -> Vec<u64> {
        let flag = |bit: u64, is_set: bool| if is_set { bit } else { 0 };
        let flags = flag(REFUSES, progress.refusal.is_some()) | flag(HAS_DATA, progress.has_data);
        let (step, parameter) = progress.non_finite.map_or((0, NONE), |(step, owner)| (step, owner as u64));
        let mut words = vec![flags, parameter, step];
        let bits = |owners: &[bool]| owners.iter().rev().fold(0, |word, &bit| word << 1 | u64::from(bit));
        words.extend(progress.present.chunks(u64::BITS as usize).map(bits));
        if with_order {
            words.extend(progress.arrived.iter().map(|&owner| owner as u64));
            let absent = progress.present.len() - progress.arrived.len();
            words.extend(std::iter::repeat_n(NONE, absent));
        }
        words
    }

    fn refuses(&self) -> bool {
        self.0[0] & REFUSES != 0
    }

    fn has_data(&self) -> bool {
        self.0[0] & HAS_DATA != 0
    }

    /// The first gradient that is not finite on the rank, whose number is `rank`.
    fn non_finite(&self, rank: usize) -> Option<NonFiniteGradient> {
        let found = NonFiniteGradient { step: self.0[2], rank: Some(rank), parameter: self.0[1] as usize };
        (self.0[1] != NONE).then_some(found)
    }

    fn has(&self, owner: usize) -> bool {
        let bits = u64::BITS as usize;
        self.0[HEAD + owner / bits] >> (owner % bits) & 1 != 0
    }

    /// The owners in the order of their gradients; the list ends with a number beyond the last parameter, if it is shorter than `count`.
    fn order(&self, count: usize) -> &[u64] {
        &self.0[self.0.len() - count..]
    }
}

impl<M: ReducerMemory> Step<'_, '_, M> {
    /// Exchanges the lists of the ranks' gradients; returns the states of all gradients, and the first gradient that is not finite.
    pub(super) fn vote(&mut self) -> Result<(Vec<GradientState>, Option<NonFiniteGradient>)> {
        let comm = self.reducer.comm;
        if let Some((present, _)) = &self.reducer.fixed {
            let progress = self.under_way();
            let differs = |owner: &usize| progress.has_data && present[*owner] != progress.present[*owner];
            if let Some(owner) = (0..present.len()).find(differs) {
                let (now, then) = if present[owner] { ("no gradient", "one") } else { ("a gradient", "none") };
                let number = self.reducer.number;
                let text = format!(
                    "has {now} on this rank in step {number}, and had {then} in the first step: with `static_graph` each rank has gradients \
                     of the same parameters in every step"
                );
                let error = self.reducer.refused(owner, &text);
                self.progress().refusal.get_or_insert(error);
            }
        }
        let plan = ComparedCall::of(self.reducer.operation());
        match &self.reducer.fixed {
            // No host waits for another one, so that an error of one rank can only end the communicator, through a call that the others
            // do not make.
            Some((_, states)) if !self.reducer.votes_always() => {
                let (progress, states) = (self.under_way(), states.clone());
                let unseen = progress.non_finite.filter(|_| self.reducer.updated.is_none());
                let found = unseen.map(|(step, parameter)| {
                    self.reducer.not_finite(NonFiniteGradient { step, rank: Some(comm.rank()), parameter })
                });
                return match self.progress().refusal.take().or(found) {
                    Some(error) => agree(comm, &plan, Err(error)),
                    None => Ok((states, None)),
                };
            }
            _ => {}
        }
        let is_first = self.reducer.order == Order::Unknown;
        let words = Vote::words(self.under_way(), is_first);
        let all = if comm.world_size() == 1 { words } else { gather(comm, &words)? };
        let votes: Vec<Vote<'_>> = all.chunks_exact(all.len() / comm.world_size()).map(Vote).collect();
        if votes.iter().any(Vote::refuses) {
            let refusal = self.progress().refusal.take();
            return match comm.world_size() {
                1 => Err(refusal.expect("the only rank refuses")),
                _ => agree(comm, &plan, refusal.map_or(Ok(()), Err)).map(|()| (Vec::new(), None)),
            };
        }
        self.check_absent(&votes)?;
        let found = votes.iter().enumerate().find_map(|(rank, vote)| vote.non_finite(rank));
        let states = match comm.world_size() {
            1 => self.states_of(|owner| self.under_way().states[owner]),
            _ => self.states_of(|owner| match votes.iter().any(|vote| vote.has(owner)) {
                true => GradientState::Reduced,
                false => GradientState::Skipped,
            }),
        };
        if is_first && comm.world_size() > 1 {
            self.reducer.order = Order::Agreed(self.reducer.order_of(&votes));
        }
        if self.reducer.options.static_graph && self.reducer.fixed.is_none() {
            self.reducer.fixed = Some((self.under_way().present.clone(), states.clone()));
        }
        Ok((states, found))
    }

    /// Treats gradients that are not finite as the options say. Every rank comes to the same conclusion.
    pub(super) fn judge(
        &mut self,
        (states, found): (Vec<GradientState>, Option<NonFiniteGradient>),
    ) -> Result<(Vec<GradientState>, Option<NonFiniteGradient>)> {
        let found = match found {
            None => self.reducer.non_finite_result(&states)?,
            found => found,
        };
        let Some(found) = found else { return Ok((states, None)) };
        let reducer = &mut *self.reducer;
        let is_of_this_step = found.step == reducer.number;
        match reducer.options.non_finite {
            NonFinite::Report if is_of_this_step => {
                let error = reducer.not_finite(found);
                tracing::warn!(%error, "the step goes on");
                reducer.reported = Some(found);
                Ok((states, None))
            }
            NonFinite::Report | NonFinite::Error => Err(reducer.not_finite(found)),
            NonFinite::Leave => Ok((states, None)),
            NonFinite::Skip => {
                let error = reducer.not_finite(found);
                tracing::warn!(%error, "the step is skipped on every rank");
                Ok((self.states_of(|_| GradientState::Skipped), Some(found)))
            }
        }
    }

    /// The states of all parameters, given the states of the trained ones.
    fn states_of(&self, trained: impl Fn(usize) -> GradientState) -> Vec<GradientState> {
        let state = |(owner, parameter): (usize, &super::Parameter)| match parameter.is_trained {
            false => GradientState::NotTrained,
            true => trained(owner),
        };
        self.reducer.parameters.iter().enumerate().map(state).collect()
    }

    /// Refuses absent gradients, if the options do. Every rank sees the same votes.
    fn check_absent(&self, votes: &[Vote<'_>]) -> Result<()> {
        let (reducer, count) = (&*self.reducer, self.reducer.parameters.len());
        let has_any = |vote: &Vote<'_>| (0..count).any(|owner| vote.has(owner));
        let absent = reducer.options.absent;
        let with_data = || votes.iter().enumerate().filter(|(_, vote)| vote.has_data());
        if absent != AbsentGradients::ZerosOfWholeRanks
            && votes.iter().any(has_any)
            && let Some((rank, _)) = with_data().find(|(_, vote)| !has_any(vote))
        {
            let reason = format!(
                "rank {rank} has no gradient in step {}, and other ranks have: its loss depends on no parameter of the reducer. A rank \
                 without examples passes 0 to `step_of`, or `None` to `backward_of`; for ranks that add zeros on purpose there is \
                 `AbsentGradients::ZerosOfWholeRanks`",
                reducer.number
            );
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        if absent != AbsentGradients::Error {
            return Ok(());
        }
        for (rank, vote) in with_data() {
            let lacks = |owner: &usize| reducer.places[*owner].is_some() && !vote.has(*owner);
            if let Some(owner) = (0..count).find(lacks) {
                let number = reducer.number;
                let text =
                    format!("has no gradient on rank {rank} in step {number}, which `AbsentGradients::Error` refuses");
                return Err(reducer.refused(owner, &text));
            }
        }
        Ok(())
    }
}

impl<M: ReducerMemory> Reducer<'_, M> {
    /// Whether the ranks vote in every step, also if each step has the same gradients: hosts that wait for the reduction anyway do, and so
    /// do hosts that look at the gradients.
    fn votes_always(&self) -> bool {
        M::HOST_WAITS || self.options.non_finite.waits()
    }

    /// The order of gradients on the lowest rank that had data, with the parameters that it did not use at the end.
    fn order_of(&self, votes: &[Vote<'_>]) -> Vec<usize> {
        let count = self.parameters.len();
        let order = votes.iter().find(|vote| vote.has_data()).map_or(&[][..], |vote| vote.order(count));
        let mut order: Vec<usize> =
            order.iter().map(|&owner| owner as usize).take_while(|&owner| owner < count).collect();
        let rest: Vec<usize> =
            (0..count).filter(|owner| self.places[*owner].is_some() && !order.contains(owner)).collect();
        order.extend(rest);
        order
    }

    /// The first parameter whose reduced gradient is not finite. A mean of finite numbers is finite.
    fn non_finite_result(&self, states: &[GradientState]) -> Result<Option<NonFiniteGradient>> {
        let is_left = self.options.non_finite == NonFinite::Leave;
        let is_alone = self.comm.world_size() == 1;
        if is_left || is_alone || self.options.reduction == Reduction::Mean || !self.votes_always() {
            return Ok(None);
        }
        let reduced = |owner: &usize| self.places[*owner].is_some() && states[*owner] == GradientState::Reduced;
        for owner in (0..states.len()).filter(reduced) {
            let place = self.places[owner].expect("filtered");
            let gradient = self.buckets[place.bucket].gradient(&self.lanes, place.tensor).expect("allocated");
            if !M::all_finite(gradient.data())? {
                return Ok(Some(NonFiniteGradient { step: self.number, rank: None, parameter: owner }));
            }
        }
        Ok(None)
    }
}
