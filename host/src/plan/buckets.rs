//! The assignment of gradients to buckets, so that one collective reduces a bucket while other gradients are still computed.
//!
//! The assignment follows PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020, 3.2): in the order in which
//! gradients appear, one kind per bucket, and a smaller bucket first, so that communication begins early. Pure arithmetic.

/// Gradients that are reduced together.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) struct Bucket<K> {
    /// The kind of the gradients, such as their dtype.
    pub(crate) kind: K,
    /// The numbers of the gradients, in the order in which they appear.
    pub(crate) members: Vec<usize>,
}

/// Assigns gradients to buckets. `order` has the numbers of gradients in the order in which they appear, each with its kind and its size in
/// bytes.
///
/// A bucket is closed as soon as its size reaches its limit: `first_bytes` for the first bucket of each kind, `bytes` for all others.
/// Buckets are in the order in which their last gradients appear, which is the order in which they can be reduced.
pub(crate) fn assign<K: Copy + PartialEq>(
    order: impl IntoIterator<Item = (usize, K, usize)>,
    first_bytes: usize,
    bytes: usize,
) -> Vec<Bucket<K>> {
    /// The open bucket of a kind, with its size and its limit.
    struct Open<K> {
        bucket: Bucket<K>,
        last: usize,
        filled: usize,
        limit: usize,
    }
    let mut open: Vec<Open<K>> = Vec::new();
    let mut closed: Vec<(usize, Bucket<K>)> = Vec::new();
    for (position, (number, kind, len)) in order.into_iter().enumerate() {
        let index = open.iter().position(|open| open.bucket.kind == kind).unwrap_or_else(|| {
            open.push(Open { bucket: Bucket { kind, members: Vec::new() }, last: 0, filled: 0, limit: first_bytes });
            open.len() - 1
        });
        let current = &mut open[index];
        current.bucket.members.push(number);
        current.last = position;
        current.filled = current.filled.saturating_add(len);
        if current.filled >= current.limit {
            let members = std::mem::take(&mut current.bucket.members);
            closed.push((position, Bucket { kind, members }));
            (current.filled, current.limit) = (0, bytes);
        }
    }
    closed.extend(open.into_iter().filter(|open| !open.bucket.members.is_empty()).map(|open| (open.last, open.bucket)));
    closed.sort_by_key(|(last, _)| *last);
    closed.into_iter().map(|(_, bucket)| bucket).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::DType;

    #[test]
    fn assign_closes_a_bucket_at_its_limit_and_the_first_earlier() {
        let (bf16, f32) = (DType::BF16, DType::F32);
        let gradients = [(4, f32, 100), (3, bf16, 900), (2, f32, 100), (1, f32, 500), (0, f32, 500)];
        let buckets = assign(gradients, 150, 800);
        assert_eq!(buckets.iter().map(|bucket| &bucket.members[..]).collect::<Vec<_>>(), [&[3][..], &[4, 2], &[1, 0]]);
    }

    proptest! {
        #[test]
        fn assign_puts_each_gradient_into_one_bucket_of_its_kind(
            gradients in prop::collection::vec((0usize..4, 0usize..2000), 0..60),
            first_bytes in 0usize..3000,
            bytes in 0usize..9000,
        ) {
            let of = |number: usize| (number, DType::FLOATS[gradients[number].0], gradients[number].1);
            let order: Vec<usize> = (0..gradients.len()).rev().collect();
            let buckets = assign(order.iter().map(|&number| of(number)), first_bytes, bytes);
            let mut found: Vec<usize> = buckets.iter().flat_map(|bucket| bucket.members.clone()).collect();
            let index = |number: usize| order.iter().position(|&other| other == number).unwrap();
            for bucket in &buckets {
                prop_assert!(bucket.members.iter().all(|&number| of(number).1 == bucket.kind));
                prop_assert!(bucket.members.windows(2).all(|pair| index(pair[0]) < index(pair[1])));
                let filled: usize = bucket.members.iter().map(|&number| of(number).2).sum();
                let of_dtype: Vec<&Bucket<DType>> = buckets.iter().filter(|other| other.kind == bucket.kind).collect();
                let limit = if std::ptr::eq(of_dtype[0], bucket) { first_bytes } else { bytes };
                let is_last = std::ptr::eq(of_dtype[of_dtype.len() - 1], bucket);
                prop_assert!(is_last || filled >= limit, "{filled} bytes of {limit}");
                let without_last: usize = filled - of(*bucket.members.last().unwrap()).2;
                prop_assert!(bucket.members.len() == 1 || without_last < limit);
            }
            let last = |bucket: &Bucket<DType>| index(*bucket.members.last().unwrap());
            prop_assert!(buckets.windows(2).all(|pair| last(&pair[0]) < last(&pair[1])));
            found.sort_unstable();
            prop_assert_eq!(found, (0..gradients.len()).collect::<Vec<_>>());
        }
    }
}
