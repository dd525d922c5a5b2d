//! The products of vectors with each other that a thread computes: all of them, or a half.

use super::adasum::{product_index, products};

/// Row and column of each of the `K` products of `W` vectors: one flat loop unrolls where two nested ones do not.
pub const fn triangle<const W: usize, const K: usize>() -> [(usize, usize); K] {
    let mut places = [(0, 0); K];
    let mut i = 0;
    while i < W {
        let mut j = i;
        while j < W {
            places[product_index(i, j, W)] = (i, j);
            j += 1;
        }
        i += 1;
    }
    places
}

/// The products that a thread computes: all `K` of them, or half of the products of eight vectors, `P` in number. Either half consists of the
/// products of the vectors of one half of the ranks with each other, and of half of their products with the other vectors.
#[derive(Clone, Copy)]
pub struct ProductPart<const W: usize, const K: usize, const P: usize> {
    /// The number of the half, or 0.
    pub half: u32,
}

impl<const W: usize, const K: usize, const P: usize> ProductPart<W, K, P> {
    const IS_HALF: bool = P < K;
    /// The number of vectors of a half.
    const H: usize = W / 2;

    /// The part of a team that multiplies a chunk together with its neighbour.
    #[inline(always)]
    pub fn of_team(team: u32) -> Self {
        Self { half: if Self::IS_HALF { team % 2 } else { 0 } }
    }

    /// The rank of the vector at a place. The code is the same for both halves: the own half is at the first places. The order of the other
    /// one differs by one place, so that both halves together have each product once.
    #[inline(always)]
    pub fn rank(self, place: usize) -> usize {
        let (half, place, of_half) = (self.half, place as u32, Self::H as u32);
        let rank = match (Self::IS_HALF, place < of_half) {
            (false, _) => place,
            (true, true) => half * of_half + place,
            (true, false) => (1 - half) * of_half + (place + half) % of_half,
        };
        rank as usize
    }

    /// The places of the two vectors of each product.
    pub const fn places() -> [(usize, usize); P] {
        if !Self::IS_HALF {
            return triangle::<W, P>();
        }
        let (mut places, mut product) = ([(0, 0); P], 0);
        while product < P {
            places[product] = Self::places_in_half(product);
            product += 1;
        }
        places
    }

    /// The places of the two vectors of a product of a half: the second place is so many places behind the first one, in the same half of the
    /// places or in the other one.
    const fn places_in_half(product: usize) -> (usize, usize) {
        let of_others = product >= products(Self::H);
        let product = if of_others { product - products(Self::H) } else { product };
        let (first, distance) = (product % Self::H, product / Self::H);
        let second = (first + distance) % Self::H;
        (first, if of_others { Self::H + second } else { second })
    }

    /// The index of a product among all.
    #[inline(always)]
    pub fn product(self, product: usize) -> usize {
        if !Self::IS_HALF {
            return product;
        }
        let (first, second) = Self::places_in_half(product);
        let (first, second) = (self.rank(first), self.rank(second));
        if first < second { product_index(first, second, W) } else { product_index(second, first, W) }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;

    /// The indices of the products of a part, by the ranks at their places.
    fn products_of<const W: usize, const K: usize, const P: usize>(team: u32) -> Vec<usize> {
        let part = ProductPart::<W, K, P>::of_team(team);
        let found = ProductPart::<W, K, P>::places().into_iter().enumerate().map(|(product, (first, second))| {
            let (first, second) = (part.rank(first), part.rank(second));
            let index = product_index(first.min(second), first.max(second), W);
            assert_eq!(part.product(product), index, "product {product} of team {team}");
            index
        });
        found.collect()
    }

    #[test]
    fn product_part_has_all_products_or_halves_have_each_once() {
        assert!(products_of::<4, 10, 10>(1).into_iter().eq(0..10));
        assert!(products_of::<8, 36, 36>(5).into_iter().eq(0..36));
        let mut both = [products_of::<8, 36, 18>(2), products_of::<8, 36, 18>(3)].concat();
        both.sort_unstable();
        assert!(both.into_iter().eq(0..36));
        for team in 0..2 {
            let part = ProductPart::<8, 36, 18>::of_team(team);
            let mut ranks: Vec<usize> = (0..8).map(|place| part.rank(place)).collect();
            assert_eq!(ranks[0], team as usize * 4, "the own half is first");
            ranks.sort_unstable();
            assert!(ranks.into_iter().eq(0..8), "every rank has a place");
        }
    }
}
