//! Random graphs of transfers, cut into calls at random, so that ranks meet in unforeseen orders.
//!
//! All ranks share one ordered list of transfers. Each rank takes its own transfers in that order and cuts them into calls of consecutive
//! transfers; inside a call, it may list them in any order that keeps the order of transfers of the same pair of ranks. Such calls never
//! deadlock: the first transfer in the list that is not complete belongs to the current call on both sides.

use std::collections::BTreeMap;

use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{CommError, Ranks};
use gradsync::internal::run_each;
use gradsync::{Error, Result};
use gradsync_tests::inputs::Random;
use gradsync_tests::ranks::guarded;
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Transfer {
    from: usize,
    to: usize,
    data: Vec<u8>,
}

/// One call of a rank: the indices of the transfers that it sends and that it receives.
#[derive(Clone, Debug, Default)]
struct Call {
    sends: Vec<usize>,
    receives: Vec<usize>,
}

fn transfers(world_size: usize, random: &mut Random, count: usize) -> Vec<Transfer> {
    let transfer = |_| {
        let from = random.below(world_size as u64) as usize;
        let to = (from + 1 + random.below(world_size as u64 - 1) as usize) % world_size;
        let len = [0, 1, 3, 64, 5000][random.below(5) as usize];
        Transfer { from, to, data: (0..len).map(|_| random.bits() as u8).collect() }
    };
    (0..count).map(transfer).collect()
}

/// Shuffles a list; elements with equal keys keep their order.
fn shuffled(list: Vec<usize>, random: &mut Random, key: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut queues: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for &index in list.iter().rev() {
        queues.entry(key(index)).or_default().push(index);
    }
    let mut order: Vec<usize> = list.into_iter().map(&key).collect();
    for end in (1..order.len()).rev() {
        order.swap(end, random.below(end as u64 + 1) as usize);
    }
    order.iter().filter_map(|key| queues.get_mut(key)?.pop()).collect()
}

/// The calls of one rank.
fn calls(rank: usize, transfers: &[Transfer], longest: usize, random: &mut Random) -> Vec<Call> {
    let mut calls = Vec::new();
    let mut call = Call::default();
    let mut left = 1 + random.below(longest as u64);
    for (index, transfer) in transfers.iter().enumerate() {
        if transfer.from != rank && transfer.to != rank {
            continue;
        }
        let list = if transfer.from == rank { &mut call.sends } else { &mut call.receives };
        list.push(index);
        left -= 1;
        if left == 0 {
            calls.push(std::mem::take(&mut call));
            left = 1 + random.below(longest as u64);
        }
    }
    calls.push(call);
    for call in &mut calls {
        call.sends = shuffled(std::mem::take(&mut call.sends), random, |index| transfers[index].to);
        call.receives = shuffled(std::mem::take(&mut call.receives), random, |index| transfers[index].from);
    }
    calls
}

/// Makes a rank's calls and compares the received payloads.
fn make(comm: &LocalCommunicator, transfers: &[Transfer], calls: &[Call]) -> Result<()> {
    for call in calls {
        let sends: Vec<(usize, &[u8])> =
            call.sends.iter().map(|&index| (transfers[index].to, &transfers[index].data[..])).collect();
        let mut incoming: Vec<Vec<u8>> =
            call.receives.iter().map(|&index| vec![0xAA; transfers[index].data.len()]).collect();
        let mut receives: Vec<(usize, &mut [u8])> = call
            .receives
            .iter()
            .map(|&index| transfers[index].from)
            .zip(incoming.iter_mut().map(|data| &mut data[..]))
            .collect();
        gradsync_tests::ranks::exchange_bytes(comm, &sends, &mut receives)?;
        for (&index, data) in call.receives.iter().zip(&incoming) {
            assert!(*data == transfers[index].data, "transfer {index}: {} bytes are not those sent", data.len());
        }
    }
    Ok(())
}

/// The outcome of each rank's calls.
fn outcomes(transfers: Vec<Transfer>, calls: Vec<Vec<Call>>) -> Vec<Result<()>> {
    guarded(20, move || {
        let ranks = run_each(calls.len(), |comm| make(&comm, &transfers, &calls[comm.rank()])).unwrap();
        ranks.into_iter().map(|outcome| outcome.expect("a rank panicked")).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn exchange_moves_all_transfers(world_size in 2usize..7, count in 1usize..60, longest in 1usize..20, seed: u64) {
        let mut random = Random::new(seed);
        let transfers = transfers(world_size, &mut random, count);
        let calls: Vec<_> = (0..world_size).map(|rank| calls(rank, &transfers, longest, &mut random)).collect();
        for (rank, outcome) in outcomes(transfers, calls).into_iter().enumerate() {
            prop_assert!(outcome.is_ok(), "rank {rank}: {outcome:?}");
        }
    }

    /// A transfer with one end missing fails at its other end and on every rank that depends on that end; nobody waits for the deadline.
    #[test]
    fn exchange_with_a_missing_end_is_an_error(
        world_size in 2usize..7,
        count in 1usize..40,
        longest in 1usize..20,
        is_sent in any::<bool>(),
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let transfers = transfers(world_size, &mut random, count);
        let mut calls: Vec<_> = (0..world_size).map(|rank| calls(rank, &transfers, longest, &mut random)).collect();
        let lost = random.below(count as u64) as usize;
        let Transfer { from, to, .. } = transfers[lost];
        let (at, other) = if is_sent { (to, from) } else { (from, to) };
        for call in &mut calls[at] {
            let list = if is_sent { &mut call.receives } else { &mut call.sends };
            list.retain(|index| *index != lost);
        }
        // After the missing end, later transfers of the pair are matched with each other's payloads: only the communicator compares them,
        // by length, so all payloads have the same content.
        let transfers: Vec<_> = transfers
            .into_iter()
            .map(|transfer| Transfer { data: vec![1; transfer.data.len()], ..transfer })
            .collect();
        let outcomes = outcomes(transfers, calls);
        prop_assert!(outcomes[other].is_err(), "rank {other} found no counterpart, and no error");
        for outcome in outcomes {
            let is_expected =
                matches!(&outcome, Ok(()) | Err(Error::Comm(CommError::Mismatch { .. } | CommError::PeerGone { .. })));
            prop_assert!(is_expected, "{outcome:?}");
        }
    }
}
