//! candle's fused operations, which have no backward pass, and the operations that train in their place: the table in the README.

use candle_core::{D, Device, Result, Tensor, Var};
use candle_nn::{LayerNorm, Module, RmsNorm, ops, rotary_emb};

const README: &str = include_str!("../../README.md");

/// Two heads of three positions and four numbers each.
fn input() -> Var {
    let numbers: Vec<f32> = (0..24).map(|number| ((number * 7) % 24) as f32 / 24.0).collect();
    Var::from_tensor(&Tensor::from_vec(numbers, (1, 2, 3, 4), &Device::Cpu).unwrap()).unwrap()
}

/// Compares both operations, whose results agree, and only one of which has a gradient.
#[track_caller]
fn replaced(names: [&str; 2], fused: impl Fn(&Tensor) -> Result<Tensor>, plain: impl Fn(&Tensor) -> Result<Tensor>) {
    let is_row = |line: &str| line.starts_with('|') && names.iter().all(|name| line.contains(name));
    assert!(README.lines().any(is_row), "the README has no row of {names:?}");
    let x = input();
    let (fused, plain) = (fused(&x).unwrap(), plain(&x).unwrap());
    let difference = (&fused - &plain).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    assert!(difference < 1e-5, "{names:?} differ by {difference}");
    assert!(fused.sqr().unwrap().sum_all().unwrap().backward().unwrap().get(&x).is_none(), "{names:?}");
    assert!(plain.sqr().unwrap().sum_all().unwrap().backward().unwrap().get(&x).is_some(), "{names:?}");
}

#[test]
fn backward_of_the_replacement_of_each_fused_operation() {
    let weight = Tensor::from_vec(vec![1f32, 2.0, 0.5, -1.0], 4, &Device::Cpu).unwrap();
    let bias = Tensor::from_vec(vec![0.5f32, 0.0, 1.0, 2.0], 4, &Device::Cpu).unwrap();
    let with_bias = LayerNorm::new(weight.clone(), bias.clone(), 1e-5);
    let without = LayerNorm::new_no_bias(weight.clone(), 1e-5);
    replaced(
        ["`LayerNorm` with a bias", "`layer_norm_no_bias`"],
        |x| with_bias.forward(x),
        |x| without.forward(x)?.broadcast_add(&bias),
    );
    let norm = RmsNorm::new(weight, 1e-5);
    replaced(["`RmsNorm::forward`", "`RmsNorm::forward_diff`"], |x| norm.forward(x), |x| norm.forward_diff(x));
    replaced(["`ops::softmax_last_dim`", "`ops::softmax("], ops::softmax_last_dim, |x| ops::softmax(x, D::Minus1));
    let angles = Tensor::arange(0f32, 6.0, &Device::Cpu).and_then(|angles| angles.reshape((3, 2))).unwrap();
    let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
    replaced(
        ["`rotary_emb::rope`", "`rotary_emb::rope_slow`"],
        |x| rotary_emb::rope(x, &cos, &sin),
        |x| rotary_emb::rope_slow(x, &cos, &sin),
    );
    replaced(
        ["`rope_i`", "`rope_i_slow`"],
        |x| rotary_emb::rope_i(x, &cos, &sin),
        |x| rotary_emb::rope_i_slow(x, &cos, &sin),
    );
}
