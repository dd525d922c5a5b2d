//! Adasum by its definition: the pair rule, and the tree of adjacent pairs in which an unpaired node moves up unchanged.
//!
//! The whole tree is kept, because the error bounds of [`crate::tolerance`] walk it. The oracle forms the vectors and uses no Gram matrix,
//! so that an error in the Gram formulation cannot hide in it.

use std::ops::Range;

use super::exact::{Wide, dot};

/// Squared norms below this give the coefficient 1: the square root of the smallest normal `f64`.
pub const SMALLEST_SQUARED_NORM: f64 = 1.491_668_146_240_041_3e-154;

/// One node of the tree: an input, or the Adasum of two nodes.
#[derive(Clone, Debug)]
pub struct Node {
    /// The vector.
    pub vector: Vec<Wide>,
    /// The weight of each rank's input in `vector`; 0 for ranks outside this node's subtree.
    pub weights: Vec<Wide>,
    /// The node's derivation.
    pub origin: Origin,
}

/// The derivation of a node's vector.
#[derive(Clone, Debug)]
pub enum Origin {
    /// The input of this rank.
    Input(usize),
    /// The pair rule applied to two nodes.
    Pair(Box<Node>, Box<Node>, Pair),
}

/// The scalars of one application of the pair rule.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// a·b
    pub dot: Wide,
    /// |a|²
    pub left_square: Wide,
    /// |b|²
    pub right_square: Wide,
    /// The coefficient of a.
    pub left: Wide,
    /// The coefficient of b.
    pub right: Wide,
}

/// The scalars of the pair rule for two vectors.
pub fn pair(a: &[Wide], b: &[Wide]) -> Pair {
    let (product, left_square, right_square) = (dot(a, b), dot(a, a), dot(b, b));
    Pair {
        dot: product,
        left_square,
        right_square,
        left: coefficient(product, left_square),
        right: coefficient(product, right_square),
    }
}

/// `1 - dot / (2 square)`, or 1 where the square is too small to divide by.
fn coefficient(dot: Wide, square: Wide) -> Wide {
    if square.value() < SMALLEST_SQUARED_NORM {
        return Wide::ONE;
    }
    Wide::ONE.add(dot.div(square.add(square)).neg())
}

/// The tree over one layer: one vector per rank, all of equal length.
pub fn tree(inputs: &[&[f64]]) -> Node {
    assert!(!inputs.is_empty(), "Adasum needs at least one rank");
    let mut level: Vec<Node> = inputs
        .iter()
        .enumerate()
        .map(|(rank, input)| Node {
            vector: input.iter().map(|&value| Wide::new(value)).collect(),
            weights: (0..inputs.len()).map(|other| if other == rank { Wide::ONE } else { Wide::ZERO }).collect(),
            origin: Origin::Input(rank),
        })
        .collect();
    while level.len() > 1 {
        let mut above = Vec::new();
        let mut nodes = level.into_iter();
        while let Some(left) = nodes.next() {
            match nodes.next() {
                Some(right) => above.push(join(left, right)),
                None => above.push(left),
            }
        }
        level = above;
    }
    level.pop().expect("one node is left")
}

fn join(left: Node, right: Node) -> Node {
    let numbers = pair(&left.vector, &right.vector);
    let mix = |a: &[Wide], b: &[Wide]| -> Vec<Wide> {
        a.iter().zip(b).map(|(&x, &y)| numbers.left.mul(x).add(numbers.right.mul(y))).collect()
    };
    Node {
        vector: mix(&left.vector, &right.vector),
        weights: mix(&left.weights, &right.weights),
        origin: Origin::Pair(Box::new(left), Box::new(right), numbers),
    }
}

/// The tree of every layer of `inputs` (one flat vector per rank), layer by layer.
pub fn trees(inputs: &[Vec<f64>], layers: &[Range<usize>]) -> Vec<Node> {
    layers
        .iter()
        .map(|layer| {
            let parts: Vec<&[f64]> = inputs.iter().map(|input| &input[layer.clone()]).collect();
            tree(&parts)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adasum(inputs: &[&[f64]]) -> Vec<f64> {
        tree(inputs).vector.iter().map(|value| value.value()).collect()
    }

    #[test]
    fn pair_obeys_the_algebra_of_the_rule() {
        assert_eq!(adasum(&[&[1.0, 0.0], &[0.0, 1.0]]), [1.0, 1.0]);
        assert_eq!(adasum(&[&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]]), [1.0, 2.0, 3.0]);
        assert_eq!(adasum(&[&[1.0, 2.0], &[2.0, 4.0]]), [1.5, 3.0]);
        assert_eq!(adasum(&[&[0.0, 0.0], &[3.0, 4.0]]), [3.0, 4.0]);
        assert_eq!(adasum(&[&[0.0, 0.0], &[0.0, 0.0]]), [0.0, 0.0]);
        assert_eq!(adasum(&[&[1.0, -2.0], &[-1.0, 2.0]]), [0.0, 0.0]);
    }

    #[test]
    fn tree_gives_upstreams_case_and_its_coefficients() {
        let node = tree(&[&[4.0, 5.0, 6.0], &[7.0, 8.0, 9.0]]);
        for (got, expected) in node.vector.iter().zip([5.6301, 6.5235, 7.4169]) {
            assert!((got.value() - expected).abs() < 5e-5, "{got:?}");
        }
        assert!((node.weights[0].value() - 0.207_792_208).abs() < 1e-9);
        assert!((node.weights[1].value() - 0.685_567_01).abs() < 1e-8);
    }

    #[test]
    fn tree_weights_rebuild_the_vector_for_every_rank_count() {
        for world_size in 1..=9 {
            let inputs: Vec<Vec<f64>> =
                (0..world_size).map(|r| (0..13).map(|i| f64::from((r * 7 + i * i * 3) % 11 - 5)).collect()).collect();
            let parts: Vec<&[f64]> = inputs.iter().map(Vec::as_slice).collect();
            let node = tree(&parts);
            for i in 0..13 {
                let sum = inputs
                    .iter()
                    .zip(&node.weights)
                    .fold(Wide::ZERO, |sum, (input, &weight)| sum.add(weight.mul(Wide::new(input[i]))));
                assert!((sum.value() - node.vector[i].value()).abs() < 1e-13);
            }
        }
    }

    #[test]
    fn tree_moves_the_odd_one_up_unchanged() {
        // Orthogonal pair first, then the third: (1,1,0) with (0,0,5) is orthogonal again.
        assert_eq!(adasum(&[&[1.0, 0.0, 0.0], &[0.0, 1.0, 0.0], &[0.0, 0.0, 5.0]]), [1.0, 1.0, 5.0]);
        // ((a, b), c) and not (a, (b, c)): with b = c = (2, 0) the orders differ.
        assert_eq!(adasum(&[&[4.0, 0.0], &[2.0, 0.0], &[2.0, 0.0]]), [2.5, 0.0]);
    }
}
